"""The carrier over ranks that answer in any order, or never: a slot has one parcel at a time."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import replace

import msgspec
import pytest

from moe_serve.cluster.control.messages import Loaded
from moe_serve.cluster.control.parcel_messages import (
    ExpectPages,
    ForgetPages,
    PagesArrived,
    PagesSent,
    PagesTaken,
    ParcelFacts,
    ParcelOrder,
    ParcelReport,
    SendPages,
    TakePages,
)
from moe_serve.cluster.parcels.parcel import Lease, Parcel, ParcelEnd, RankPlace
from moe_serve.cluster.parcels.rank_carrier import RankCarrier
from moe_serve.config.cells import CellsConfig, PageLinkName
from moe_serve.engine.opened_model import LoadReport
from moe_serve.errors import ConfigError

PAGE, NUM_SLOTS, TIMEOUT_S = 1000, 12, 30.0
SOURCE, TARGET = RankPlace(0, "attention-0", 1), RankPlace(1, "attention-0", 1)
REPORT = LoadReport(
    kernels="native",
    num_threads=1,
    dtype="bfloat16",
    device="cpu",
    weight_format="bfloat16",
    expert_weights="bfloat16",
    build="b1",
)
FACTS = ParcelFacts(
    page_size=16, page_bytes=PAGE, geometry="ab" * 32, has_memory=True, host="h", port=1
)
LOADED = Loaded(weights_hash="cd" * 32, report=REPORT, load_seconds=1.0, parcels=FACTS)


class FakeRanks:
    """Implements CellRanks. A rank does its orders in order, when the test lets it. What is in a
    slot is the ticket of the parcel that was written there."""

    def __init__(self, link: PageLinkName) -> None:
        facts = msgspec.structs.replace(FACTS, has_memory=link == "shared")
        self.link = link
        self.all = msgspec.structs.replace(LOADED, parcels=facts)
        self.special: dict[RankPlace, Loaded] = {}
        self.gone: set[RankPlace] = set()
        self.orders: dict[RankPlace, deque[ParcelOrder]] = defaultdict(deque)
        self.slots: dict[tuple[object, int], int] = {}
        self.expected: dict[int, tuple[RankPlace, tuple[int, ...]]] = {}
        self.on_the_wire: list[tuple[SendPages, RankPlace]] = []
        self.coming: dict[int, tuple[SendPages, RankPlace, RankPlace, tuple[int, ...]]] = {}
        self.forgotten: set[int] = set()
        self.pages: dict[tuple[RankPlace, int], int] = {}  # page -> ticket

    def loaded(self, place: RankPlace) -> Loaded | None:
        if place in self.gone or self.link != "nixl":
            return None if place in self.gone else self.special.get(place, self.all)
        name = msgspec.json.encode((place.cell, place.rank, place.start))
        facts = msgspec.structs.replace(FACTS, has_memory=False, port=0, agent=name, base=77)
        return msgspec.structs.replace(self.all, parcels=facts)

    def send(self, place: RankPlace, order: ParcelOrder) -> None:
        if place not in self.gone:
            self.orders[place].append(order)

    def obey(self, place: RankPlace) -> ParcelReport | None:
        """Does a rank's next order."""
        order = self.orders[place].popleft()

        def memory(is_common: bool) -> object:
            return "common" if is_common else place

        if isinstance(order, SendPages):
            for slot in order.slots:
                self.slots[memory(order.is_common), slot] = order.ticket
            if not order.is_common:
                self.on_the_wire.append((order, place))
                return None
            return PagesSent(ticket=order.ticket, checksum=order.ticket)
        if isinstance(order, ExpectPages):
            self.expected[order.ticket] = (place, tuple(order.slots))
            return None
        if isinstance(order, ForgetPages):
            if order.ticket in self.coming:
                self.forgotten.add(order.ticket)
                return None
            self.expected.pop(order.ticket, None)
            return PagesTaken(ticket=order.ticket, why="forgotten")
        found = [self.slots[memory(order.is_common), slot] for slot in order.slots]
        assert found == [order.ticket] * len(found), f"{order} finds {found}"
        self.pages |= {(place, page): order.ticket for page in order.pages}
        return PagesTaken(ticket=order.ticket)

    @property
    def is_moving(self) -> bool:
        return bool(self.on_the_wire or self.coming)

    def arrive(self, dice: random.Random | None = None) -> list[tuple[RankPlace, ParcelReport]]:
        """Moves a parcel over the wire by half its way; returns what its ends report."""
        is_start = dice is not None and dice.random() < 0.5
        if not self.coming or (is_start and self.on_the_wire):
            order, source = self.on_the_wire.pop(0)
            if order.agent:  # NIXL writes whatever the target expects
                target = RankPlace(*msgspec.json.decode(order.agent))
                taken = tuple((address - 77) // PAGE for address in order.addresses)
                self.coming[order.ticket] = (order, source, target, taken)
                return []
            if order.ticket not in self.expected:
                return [(source, PagesSent(ticket=order.ticket, why="refused"))]
            self.coming[order.ticket] = (order, source, *self.expected.pop(order.ticket))
            return []
        tickets = list(self.coming)
        ticket = tickets[0] if dice is None else dice.choice(tickets)
        order, source, target, slots = self.coming.pop(ticket)
        for slot, own in zip(slots, order.slots, strict=True):
            self.slots[target, slot] = self.slots[source, own]
        if order.agent:
            return [(source, PagesSent(ticket=ticket, checksum=ticket))]
        arrived: ParcelReport = PagesArrived(ticket=ticket, checksum=ticket)
        if ticket in self.forgotten:
            arrived = PagesTaken(ticket=ticket, why="forgotten")
        return [(target, arrived), (source, PagesSent(ticket=ticket))]

    def lose(self, place: RankPlace) -> None:
        self.gone.add(place)
        self.orders[place].clear()
        self.expected = {t: e for t, e in self.expected.items() if e[0] != place}
        broken = [ticket for ticket, coming in self.coming.items() if coming[2] == place]
        self.on_the_wire += [self.coming.pop(ticket)[:2] for ticket in broken]


class World:
    """A carrier on a clock that the test moves."""

    def __init__(self, link: PageLinkName) -> None:
        self.ranks, self.now = FakeRanks(link), 0.0
        config = CellsConfig(link=link, memory_bytes=NUM_SLOTS * PAGE + 999, parcel_bytes=4500)
        self.carrier = RankCarrier(config, self.ranks, PAGE, TIMEOUT_S, lambda: self.now)
        self.num_leases = 0

    def parcel(
        self, count: int = 2, source: RankPlace = SOURCE, target: RankPlace = TARGET
    ) -> Parcel:
        self.num_leases += 1
        pages = tuple(range(100 * self.num_leases, 100 * self.num_leases + count))
        lease = Lease(self.num_leases, self.num_leases)
        return Parcel(
            lease=lease,
            number=0,
            source=source,
            target=target,
            source_pages=pages,
            target_pages=pages,
        )

    def obey(self, place: RankPlace) -> None:
        if (report := self.ranks.obey(place)) is not None:
            self.carrier.heard(place, report)

    def run(self) -> list[ParcelEnd]:
        """Lets all ranks do all their orders; returns what has ended."""
        while True:
            for place, orders in list(self.ranks.orders.items()):
                while orders:
                    self.obey(place)
            if self.ranks.is_moving:
                for place, report in self.ranks.arrive():
                    self.carrier.heard(place, report)
            elif not any(self.ranks.orders.values()):
                return list(self.carrier.take_ended())

    def num_free(self) -> int:
        self.carrier.check_integrity()
        return self.carrier.num_free(TARGET)


@pytest.fixture(params=["shared", "tcp", "nixl"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def test_parcels_arrive(world: World) -> None:
    assert world.carrier.can_carry(SOURCE, TARGET) == ""
    assert (world.carrier.pages_per_parcel, world.num_free()) == (4, NUM_SLOTS)
    parcels = [world.parcel(count) for count in (4, 1, 4)]
    for parcel in parcels:
        world.carrier.send(parcel)
    assert world.num_free() == NUM_SLOTS - 9 and not world.carrier.has_news
    assert world.run() == [ParcelEnd(parcel) for parcel in parcels]
    assert world.num_free() == NUM_SLOTS


@pytest.mark.parametrize("num_done", range(6))
def test_an_ended_lease(world: World, num_done: int) -> None:
    """Wherever its parcel is: nothing is reported, no page is written by an order that comes
    later, and its slots come back when the ranks have answered, not before."""
    parcel = world.parcel()
    world.carrier.send(parcel)
    for _ in range(num_done):
        for place in (SOURCE, TARGET):
            if world.ranks.orders[place]:
                world.obey(place)
                break
        else:
            if world.ranks.is_moving:
                for place, report in world.ranks.arrive():
                    world.carrier.heard(place, report)
    took = any(isinstance(order, TakePages) for order in world.ranks.orders[TARGET])
    written = dict(world.ranks.pages)
    world.carrier.end_lease(parcel.lease)
    world.carrier.check_integrity()
    assert not world.carrier.take_ended()
    if world.ranks.coming:  # the target is told, but its slots are still written to
        if world.ranks.orders[TARGET]:
            world.obey(TARGET)
        assert world.carrier._own[TARGET].taken.num_free == NUM_SLOTS - 2
    assert world.run() == []
    assert took or world.ranks.pages == written
    assert world.num_free() == NUM_SLOTS


def test_a_late_parcel(world: World) -> None:
    """Ends after the time-out. Its slots are not given to others before both ranks have
    answered."""
    parcel = world.parcel(4)
    world.carrier.send(parcel)
    world.now = TIMEOUT_S
    assert world.carrier.has_news
    end = ParcelEnd(parcel, "the pages have not arrived within 30 s", TIMEOUT_S)
    assert list(world.carrier.take_ended()) == [end]
    assert not world.carrier.has_news and world.num_free() == NUM_SLOTS - 4
    assert world.run() == [] and not world.ranks.pages
    assert world.num_free() == NUM_SLOTS


@pytest.mark.parametrize("place", [SOURCE, TARGET])
def test_a_lost_rank(world: World, place: RankPlace) -> None:
    parcel = world.parcel()
    world.carrier.send(parcel)
    world.ranks.lose(place)
    world.carrier.rank_lost(place)
    why = f"attention-0 of cell {place.cell} is lost"
    assert list(world.carrier.take_ended()) == [ParcelEnd(parcel, why)]
    assert world.run() == []
    world.carrier.heard(place, PagesSent(ticket=1))  # of no interest any more
    world.carrier.check_integrity()
    other = world.parcel()
    world.carrier.send(other)  # before its cell has told
    assert list(world.carrier.take_ended()) == [ParcelEnd(other, why)]
    assert "has not loaded" in world.carrier.can_carry(SOURCE, TARGET)
    again = replace(place, start=2)
    back = world.parcel(2, *((again, TARGET) if place == SOURCE else (SOURCE, again)))
    world.carrier.send(back)
    assert world.run() == [ParcelEnd(back)]


@pytest.mark.parametrize("link", ["shared", "tcp", "nixl"])
def test_any_order(link: PageLinkName) -> None:
    """`FakeRanks.obey` asserts that a parcel is taken from slots that hold it."""
    for seed in range(40):
        walk(World(link), random.Random(seed))


def walk(world: World, dice: random.Random) -> None:
    """Sends parcels, ends leases and loses ranks at random."""
    places = [SOURCE, TARGET]
    open_parcels: dict[Lease, Parcel] = {}
    ended: list[ParcelEnd] = []
    for _ in range(300):
        act = dice.random()
        source, target = dice.sample(places, 2)
        if act < 0.25 and world.carrier.num_free(target) > 0:
            count = dice.randint(1, min(4, world.carrier.num_free(target)))
            parcel = world.parcel(count, source, target)
            open_parcels[parcel.lease] = parcel
            world.carrier.send(parcel)
        elif act < 0.32 and open_parcels:
            lease = dice.choice(list(open_parcels))
            del open_parcels[lease]
            world.carrier.end_lease(lease)
        elif act < 0.34:
            index = dice.randrange(2)
            world.ranks.lose(places[index])
            world.carrier.rank_lost(places[index])
            places[index] = replace(places[index], start=places[index].start + 1)
        elif act < 0.36:
            world.now += TIMEOUT_S / 2
        elif act < 0.5 and world.ranks.is_moving:
            for place, report in world.ranks.arrive(dice):
                world.carrier.heard(place, report)
        elif world.ranks.orders[source]:
            world.obey(source)
        for end in world.carrier.take_ended():
            ended.append(end)
            assert open_parcels.pop(end.parcel.lease) == end.parcel, f"{end} was not open"
        world.carrier.check_integrity()
    ended += world.run()
    assert len({end.parcel.lease for end in ended}) == len(ended)
    for end in ended:
        if end.is_sound:
            held = {(end.parcel.target, page) for page in end.parcel.target_pages}
            assert len({world.ranks.pages[place] for place in held}) == 1
    assert all(world.carrier.num_free(place) == NUM_SLOTS for place in places)
    assert not world.carrier._journeys


@pytest.mark.parametrize(
    ("report", "facts", "why"),
    [
        ({"kernels": "torch"}, {}, "they differ in kernels: native at the source and torch at the"),
        ({"kv_dtype": "int8"}, {}, "in KV dtype: auto at the source and int8 at the target"),
        ({"build": "b2"}, {}, "in build of the kernels: b1 at the source and b2 at the"),
        ({}, {"page_size": 32}, "in page size: 16 at the source and 32 at the target"),
        ({}, {"geometry": "ef" * 32}, "in shape of pages: abababababab at the source and ef"),
        ({}, {"has_memory": False, "port": 0}, "cells.link is 'shared', and attention-0 of cell 1"),
    ],
)
def test_pages_that_cannot_move(report: dict[str, str], facts: dict[str, object], why: str) -> None:
    world = World("shared")
    world.ranks.special[TARGET] = msgspec.structs.replace(
        LOADED,
        report=replace(REPORT, **report),  # type: ignore[arg-type]
        parcels=msgspec.structs.replace(FACTS, **facts),
    )
    assert why in world.carrier.can_carry(SOURCE, TARGET)
    world.ranks.special[TARGET] = msgspec.structs.replace(LOADED, weights_hash="ee" * 32)
    assert "in weights: cdcdcdcdcdcd at the source and eeee" in world.carrier.can_carry(
        SOURCE, TARGET
    )
    world.ranks.special[TARGET] = msgspec.structs.replace(LOADED, parcels=None)
    assert "takes no part in parcels" in world.carrier.can_carry(SOURCE, TARGET)


def test_memory_that_holds_no_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cells\.memory_bytes is 999, .* takes 1000 bytes"):
        RankCarrier(CellsConfig(memory_bytes=999), FakeRanks("shared"), PAGE, TIMEOUT_S)
