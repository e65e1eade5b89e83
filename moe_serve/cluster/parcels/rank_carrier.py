"""Implements PageCarrier for attention ranks that are processes.

The carrier assigns slots: a parcel gets them before it is sent, and they are free again when
neither of its ranks can still write to them or read from them. A rank that was given an order is
using its slots until it has answered, or is gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.cluster.control.parcel_messages import (
    ExpectPages,
    ForgetPages,
    PagesArrived,
    PagesSent,
    PagesTaken,
    ParcelFacts,
    ParcelReport,
    SendPages,
    TakePages,
)
from moe_serve.cluster.parcels.cell_ranks import CellRanks, pages_refusal
from moe_serve.cluster.parcels.parcel import Lease, Parcel, ParcelEnd, RankPlace
from moe_serve.config.cells import CellsConfig
from moe_serve.errors import ConfigError


@dataclass(slots=True, eq=False)
class _Journey:
    """A parcel whose slots are not free yet.

    `sent` and `taken` are the slots at its two ends. They are the same ones in common memory.
    """

    ticket: int
    parcel: Parcel
    began: float
    sent: tuple[int, ...]
    taken: tuple[int, ...]
    is_common: bool
    has_port: bool  # the target says when they have arrived
    source_has: bool = True  # the source may still use its slots
    target_has: bool = False
    is_taking: bool = False  # the target was told to take it
    has_ended: bool = False  # reported, or of no more interest


class _Slots:
    """The slots of a rank with a port: as many for each direction."""

    def __init__(self, num_slots: int) -> None:
        self.sent, self.taken = SlotPool(num_slots), SlotPool(num_slots, first=num_slots)


class RankCarrier:
    """Used by the engine's thread. `heard` gets the ranks' reports."""

    def __init__(
        self,
        config: CellsConfig,
        ranks: CellRanks,
        page_bytes: int,
        timeout_s: float,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        """`page_bytes` is that of any attention rank that has loaded. A parcel that has not arrived
        after `timeout_s` ends. Raises ConfigError if the memory cannot hold a page.
        """
        self._config, self._ranks, self.page_bytes = config, ranks, page_bytes
        self._timeout_s, self._clock = timeout_s, clock
        self._num_slots = config.memory_bytes // page_bytes
        if not self._num_slots:
            raise ConfigError(
                f"cells.memory_bytes is {config.memory_bytes}, but a KV page of this model takes "
                f"{page_bytes} bytes: give at least {8 * page_bytes}."
            )
        self._common = SlotPool(self._num_slots)
        self._journeys: dict[int, _Journey] = {}  # by ticket, so oldest first
        self._ended: list[ParcelEnd] = []
        self._tickets = itertools.count(1)
        self._own: dict[RankPlace, _Slots] = {}

    @property
    def pages_per_parcel(self) -> int:
        """See `PageCarrier`."""
        return max(1, min(self._num_slots, self._config.parcel_bytes // self.page_bytes))

    @property
    def has_news(self) -> bool:
        """Returns True if `take_ended` has something to return, including late parcels."""
        return bool(self._ended) or next(self._late(), None) is not None

    def can_carry(self, source: RankPlace, target: RankPlace) -> str:
        """See `PageCarrier`."""
        ends = [self._ranks.loaded(place) for place in (source, target)]
        for place, loaded in zip((source, target), ends, strict=True):
            if loaded is None or loaded.parcels is None:
                why = "has not loaded" if loaded is None else "takes no part in parcels"
                return f"{_name(place)} {why}."
        a, b = (each for each in ends if each is not None)
        if why := pages_refusal(a, b) or self._link_refusal(source, target):
            return f"pages cannot move from {_name(source)} to {_name(target)}: {why}."
        return ""

    def num_free(self, target: RankPlace) -> int:
        """See `PageCarrier`. With ports, the rank that sends most counts as the source. 0 if the
        process is gone."""
        facts = self._facts(target)
        if facts is None:
            return 0
        free = [self._common.num_free] if facts.has_memory else []
        if facts.port or facts.agent:  # for sources on other hosts, if it has memory as well
            free.append(self._own_slots(target).taken.num_free)
            free += [slots.sent.num_free for slots in self._own.values()]
        return min(free, default=0)

    def send(self, parcel: Parcel) -> None:
        """See `PageCarrier`. If a process is gone, the parcel ends at once."""
        count, ticket = len(parcel.source_pages), next(self._tickets)
        assert count == len(parcel.target_pages) > 0, (
            f"{parcel} has no pages, or its source and target pages differ in number"
        )
        source, target = parcel.source, parcel.target
        facts = self._facts(target)
        if facts is None or self._facts(source) is None:
            gone = target if facts is None else source
            self._ended.append(ParcelEnd(parcel, f"{_name(gone)} is lost"))
            return
        is_common = self._is_common(source, target)
        if is_common:
            sent = taken = self._common.take(count)
        else:
            sent = self._own_slots(source).sent.take(count)
            taken = self._own_slots(target).taken.take(count)
        has_port = not is_common and not facts.agent
        began = self._clock()
        self._journeys[ticket] = _Journey(
            ticket, parcel, began, sent, taken, is_common, has_port, target_has=has_port
        )
        order = SendPages(ticket=ticket, pages=parcel.source_pages, slots=sent)
        if has_port:
            self._ranks.send(target, ExpectPages(ticket=ticket, slots=taken))
            order = msgspec.structs.replace(order, host=facts.host, port=facts.port)
        elif not is_common:
            addresses = tuple(facts.base + slot * self.page_bytes for slot in taken)
            order = msgspec.structs.replace(order, agent=facts.agent, addresses=addresses)
        self._ranks.send(source, order)

    def heard(self, place: RankPlace, report: ParcelReport) -> None:
        """Handles a rank's report. Reports of processes that are gone are ignored."""
        journey = self._journeys.get(report.ticket)
        if journey is None:
            return
        parcel = journey.parcel
        if isinstance(report, PagesSent) and place == parcel.source:
            journey.source_has = False
            if report.why:
                self._fail(journey, f"{_name(place)} could not send the pages: {report.why}")
            elif not journey.has_port:
                self._take(journey, report.checksum)
        elif isinstance(report, PagesArrived) and place == parcel.target:
            if report.why:
                self._fail(journey, f"the pages did not reach {_name(place)}: {report.why}")
            else:
                self._take(journey, report.checksum)
        elif isinstance(report, PagesTaken) and place == parcel.target:
            journey.target_has = False
            why = f"{_name(place)} refused the pages: {report.why}" if report.why else ""
            self._end(journey, why)
        self._release(journey)

    def end_lease(self, lease: Lease) -> None:
        """See `PageCarrier`."""
        for journey in list(self._journeys.values()):
            if journey.parcel.lease == lease and not journey.has_ended:
                journey.has_ended = True
                self._forget(journey)
                self._release(journey)
        self._ended = [end for end in self._ended if end.parcel.lease != lease]

    def take_ended(self) -> Sequence[ParcelEnd]:
        """See `PageCarrier`."""
        for journey in list(self._late()):
            self._fail(journey, f"the pages have not arrived within {self._timeout_s:g} s")
            self._release(journey)
        ended, self._ended = self._ended, []
        return ended

    def rank_lost(self, place: RankPlace) -> None:
        """See `PageCarrier`."""
        for journey in list(self._journeys.values()):
            parcel = journey.parcel
            if place not in (parcel.source, parcel.target):
                continue
            if place == parcel.source:
                journey.source_has = False
            if place == parcel.target:
                journey.target_has = False
            self._fail(journey, f"{_name(place)} is lost")
            self._release(journey)
        self._own.pop(place, None)

    def check_integrity(self) -> None:
        """Asserts that every slot is free or has one parcel."""
        pools = [self._common]
        pools += [pool for slots in self._own.values() for pool in (slots.sent, slots.taken)]
        num_used = sum(pool.num_slots - pool.num_free for pool in pools)
        num_held = 0
        for journey in self._journeys.values():
            assert journey.source_has or journey.target_has, f"no rank has the slots of {journey}"
            if journey.is_common or journey.parcel.source in self._own:
                num_held += len(journey.sent)
            if not journey.is_common and journey.parcel.target in self._own:
                num_held += len(journey.taken)
        assert num_used == num_held, f"{num_used} slots are in use, and parcels have {num_held}"

    def _take(self, journey: _Journey, checksum: int) -> None:
        """Tells the target to take a parcel, if that is still wanted."""
        if journey.has_ended:
            return
        journey.target_has = journey.is_taking = True
        order = TakePages(
            ticket=journey.ticket,
            slots=journey.taken,
            pages=journey.parcel.target_pages,
            checksum=checksum,
            is_common=journey.is_common,
        )
        self._ranks.send(journey.parcel.target, order)

    def _fail(self, journey: _Journey, why: str) -> None:
        self._end(journey, why)
        self._forget(journey)

    def _end(self, journey: _Journey, why: str) -> None:
        """Reports the end of a parcel, unless it was already reported."""
        if not journey.has_ended:
            journey.has_ended = True
            seconds = self._clock() - journey.began
            self._ended.append(ParcelEnd(journey.parcel, why, seconds))

    def _forget(self, journey: _Journey) -> None:
        """Makes the target stop waiting for a parcel that it was not yet told to take. The target
        answers.
        """
        if journey.target_has and not journey.is_taking:
            journey.is_taking = True
            self._ranks.send(journey.parcel.target, ForgetPages(ticket=journey.ticket))

    def _release(self, journey: _Journey) -> None:
        """Frees the slots that no rank uses any more."""
        is_done = not journey.source_has and not journey.target_has
        if is_done:
            self._journeys.pop(journey.ticket, None)
        if journey.is_common:
            if is_done:
                self._common.give_back(journey.sent)
                journey.sent = ()
            return
        if not journey.source_has:
            if (slots := self._own.get(journey.parcel.source)) is not None:
                slots.sent.give_back(journey.sent)
            journey.sent = ()
        is_written = journey.source_has and not journey.has_port  # by the source, through NIXL
        if not journey.target_has and not is_written:
            if (slots := self._own.get(journey.parcel.target)) is not None:
                slots.taken.give_back(journey.taken)
            journey.taken = ()

    def _late(self) -> Iterator[_Journey]:
        limit = self._clock() - self._timeout_s
        return (j for j in self._journeys.values() if not j.has_ended and j.began <= limit)

    def _facts(self, place: RankPlace) -> ParcelFacts | None:
        loaded = self._ranks.loaded(place)
        return None if loaded is None else loaded.parcels

    def _is_common(self, source: RankPlace, target: RankPlace) -> bool:
        ends = (self._facts(source), self._facts(target))
        return all(facts is not None and facts.has_memory for facts in ends)

    def _link_refusal(self, source: RankPlace, target: RankPlace) -> str:
        if self._is_common(source, target):
            return ""
        for place in (source, target):
            facts = self._facts(place)
            if facts is None or not (facts.port or facts.agent):
                return (
                    f"cells.link is {self._config.link!r}, and {_name(place)} has "
                    "neither the common memory of one host nor a link of its own"
                )
        return ""

    def _own_slots(self, place: RankPlace) -> _Slots:
        if place not in self._own:
            self._own[place] = _Slots(self._num_slots)
        return self._own[place]


def _name(place: RankPlace) -> str:
    return f"{place.rank} of cell {place.cell}"


class SlotPool:
    """Gives slots to parcels. The lowest free slots are used first, so that memory that is never
    needed is never touched.
    """

    def __init__(self, num_slots: int, first: int = 0) -> None:
        self.num_slots = num_slots
        self._free = list(range(first + num_slots - 1, first - 1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        assert count <= self.num_free, f"{count} slots of {self.num_free} that are free"
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, slots: tuple[int, ...]) -> None:
        self._free += reversed(slots)
        assert len(self._free) <= self.num_slots, "a slot was given back twice"
