"""Carries KV pages between simulated cells. Only the time that they take is simulated."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_serve.clock import Clock
from moe_serve.cluster.parcels.parcel import Lease, Parcel, ParcelEnd, RankPlace
from moe_serve.simulate.coordinated.shared_links import SharedLinks


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLinks:
    """The links that pages travel on. `bytes_per_s[cell]`: of one attention rank of a cell, all its
    devices together, one way. Sizes are as `CellsConfig` has them."""

    bytes_per_s: Sequence[float]
    latency_s: float
    page_bytes: int
    parcel_bytes: int
    memory_bytes: int


@dataclass(slots=True)
class _Underway:
    """A parcel, and when it was sent."""

    parcel: Parcel
    sent_s: float


class InstantCarrier:
    """Implements PageCarrier.

    As with real ranks, an order to a rank takes effect between two of its steps. So a parcel leaves
    when the step that its source runs has ended, shares the links of both ranks with other parcels,
    and is in place when the step that its target runs at its arrival has ended.
    """

    def __init__(self, links: PageLinks, clock: Clock, step_end: Callable[[int], float]) -> None:
        """`step_end(cell)`: when the step ends that the cell runs; now, if it runs none."""
        self._links, self._clock, self._step_end = links, clock, step_end
        self._shared, self._numbers = SharedLinks(), itertools.count()
        self._underway: dict[int, _Underway] = {}
        self._coming: Counter[RankPlace] = Counter()  # pages on their way to a rank
        self._events: list[tuple[float, int, Callable[[int], None]]] = []  # (time, number, what)
        self._ended: list[ParcelEnd] = []
        self.num_bytes, self.num_parcels = 0, 0  # of all that arrived
        self._now = 0.0  # of the event that is handled

    @property
    def page_bytes(self) -> int:
        return self._links.page_bytes

    @property
    def pages_per_parcel(self) -> int:
        return max(1, self._links.parcel_bytes // self._links.page_bytes)

    def can_carry(self, source: RankPlace, target: RankPlace) -> str:
        """Returns an empty text: pages travel between all cells of a simulation."""
        return ""

    def num_free(self, target: RankPlace) -> int:
        num_slots = max(self.pages_per_parcel, self._links.memory_bytes // self._links.page_bytes)
        return max(0, num_slots - self._coming[target])

    def send(self, parcel: Parcel) -> None:
        """See `PageCarrier.send`."""
        number, now = next(self._numbers), self._clock()
        self._underway[number] = _Underway(parcel, now)
        self._coming[parcel.target] += len(parcel.target_pages)
        self._at(max(now, self._step_end(parcel.source.cell)), number, self._leave)

    def end_lease(self, lease: Lease) -> None:
        """See `PageCarrier.end_lease`."""
        for number, each in list(self._underway.items()):
            if each.parcel.lease == lease:
                self._shared.take(number, self._clock())
                self._forget(number)

    def take_ended(self) -> Sequence[ParcelEnd]:
        ended, self._ended = self._ended, []
        return ended

    def rank_lost(self, place: RankPlace) -> None:
        """Does nothing, because no simulated rank is ever lost."""

    @property
    def has_ended(self) -> bool:
        """True if `take_ended` returns parcels."""
        return bool(self._ended)

    @property
    def next_s(self) -> float | None:
        """The time of the next event of a parcel; None if no parcel is on its way."""
        end, events = self._shared.next_end(), self._events
        if end is None:
            return events[0][0] if events else None
        return min(end[0], events[0][0]) if events else end[0]

    def advance_to(self, now: float) -> None:
        """Handles the events that are due. `take_ended` then returns the parcels that have
        ended.
        """
        while (next_s := self.next_s) is not None and next_s <= now:
            arrival = self._shared.next_end()
            if arrival is not None and arrival[0] == next_s:
                self._shared.take(arrival[1], next_s)
                self._at(next_s + self._links.latency_s, arrival[1], self._land)
            else:
                at_s, number, what = heapq.heappop(self._events)
                self._now = at_s
                if number in self._underway:
                    what(number)

    def _at(self, at_s: float, number: int, what: Callable[[int], None]) -> None:
        heapq.heappush(self._events, (at_s, number, what))

    def _leave(self, number: int) -> None:
        parcel = self._underway[number].parcel
        for place in (parcel.source, parcel.target):
            self._shared.set_bandwidth(place, self._links.bytes_per_s[place.cell])
        num_bytes = len(parcel.source_pages) * self._links.page_bytes
        self._shared.put(number, parcel.source, parcel.target, num_bytes, self._now)

    def _land(self, number: int) -> None:
        """Lets the target copy a parcel into its pages: now, or when its step has ended."""
        ready_s = self._step_end(self._underway[number].parcel.target.cell)
        if ready_s > self._now:
            self._at(ready_s, number, self._finish)
        else:
            self._finish(number)

    def _finish(self, number: int) -> None:
        each = self._underway[number]
        self._ended.append(ParcelEnd(each.parcel, seconds=self._now - each.sent_s))
        self.num_bytes += len(each.parcel.source_pages) * self._links.page_bytes
        self.num_parcels += 1
        self._forget(number)

    def _forget(self, number: int) -> None:
        each = self._underway.pop(number)
        self._coming[each.parcel.target] -= len(each.parcel.target_pages)
