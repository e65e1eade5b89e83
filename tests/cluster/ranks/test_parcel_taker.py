"""A rank takes parcels beside its steps: an order that names their pages finds what it would find
if they were taken between orders."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import pytest

from moe_serve.cluster.control.messages import PageWork, QueryPages, RunStep, Slice
from moe_serve.cluster.control.parcel_messages import PagesTaken, ParcelReport, TakePages
from moe_serve.cluster.ranks.rank_parcels import _named_pages
from moe_serve.cluster.ranks.shard_parcels import ParcelTaker, ShardParcels
from moe_serve.errors import ChannelClosedError

_LONGEST_S = 200.0
REFUSED = "their checksum is wrong"


@dataclass
class Pages(ShardParcels):
    """A shard whose pages are numbers: those of a parcel become its ticket, once `may_load`."""

    content: list[int] = field(default_factory=lambda: [0] * 12)
    may_load: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Event = field(default_factory=threading.Event)
    refused: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)

    def load(self, order: TakePages) -> str:
        self.has_begun.set()
        assert self.may_load.wait(_LONGEST_S)
        for page in order.pages:
            self.content[page] = order.ticket
        if order.ticket in self.broken:
            raise ValueError("injected")
        return REFUSED if order.ticket in self.refused else ""

    def clear(self, pages: object) -> None:
        for page in pages:  # type: ignore[attr-defined]
            self.content[page] = 0


class Rank:
    """A taker of parcels, and what it has told."""

    def __init__(self) -> None:
        self.pages, self.told = Pages(), SimpleQueue[ParcelReport]()
        self.taker = ParcelTaker(self.pages, self.told.put)

    def take(self, ticket: int, *pages: int) -> None:
        order = TakePages(ticket=ticket, slots=pages, pages=pages, checksum=0, is_common=True)
        self.taker.take(order)

    def next(self) -> ParcelReport:
        return self.told.get(timeout=_LONGEST_S)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.pages.may_load.set()
    made.taker.close()
    assert not made.taker._thread.is_alive()


def test_only_an_order_that_names_the_pages_waits(rank: Rank) -> None:
    rank.take(1, 4, 5)
    rank.take(2, 7)
    assert rank.pages.has_begun.wait(_LONGEST_S)
    assert rank.taker.is_busy and rank.told.empty()
    rank.taker.settle([1, 6, 8])  # a step of other sequences
    seen: list[int] = []

    def names_a_page() -> None:
        rank.taker.settle([1, 7])
        seen.append(rank.pages.content[7])

    waits = threading.Thread(target=names_a_page)
    waits.start()
    waits.join(0.05)
    assert waits.is_alive() and not seen
    rank.pages.may_load.set()
    waits.join(_LONGEST_S)
    assert seen == [2]
    assert [rank.next(), rank.next()] == [PagesTaken(ticket=1), PagesTaken(ticket=2)]
    assert not rank.taker.is_busy


def test_pages_of_a_refused_parcel_are_zero_before_the_answer(rank: Rank) -> None:
    rank.pages.may_load.set()
    rank.pages.refused.add(1)
    rank.take(1, 4, 5)
    assert rank.next() == PagesTaken(ticket=1, why=REFUSED)
    assert not any(rank.pages.content)


def test_an_error_ends_its_parcel_only(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    rank.pages.may_load.set()
    rank.pages.broken.add(1)
    rank.take(1, 4, 5)
    rank.take(2, 6)
    assert rank.next() == PagesTaken(ticket=1, why="ValueError: injected")
    assert rank.next() == PagesTaken(ticket=2)
    assert rank.pages.content[4:7] == [0, 0, 2] and "a parcel could not be taken" in caplog.text


def test_nothing_waits_once_nobody_hears_the_rank() -> None:
    def tell(report: ParcelReport) -> None:
        raise ChannelClosedError("the coordinator is gone")

    pages = Pages()
    taker = ParcelTaker(pages, tell)
    for ticket in (1, 2):
        order = TakePages(ticket=ticket, slots=(3,), pages=(3,), checksum=0, is_common=True)
        taker.take(order)
    pages.may_load.set()
    taker.settle([3])
    taker.close()
    taker.take(order)
    taker.settle([3])
    assert not taker.is_busy


def test_any_order_of_work_ends_as_if_it_were_done_in_order() -> None:
    """Parcels, and other work that changes or reads pages after it has waited for them."""
    for seed in range(30):
        dice, rank = random.Random(seed), Rank()
        rank.pages.may_load.set()
        expected = [0] * 12
        for ticket in range(1, 60):
            pages = dice.sample(range(12), dice.randint(1, 4))
            if dice.random() < 0.5:
                rank.take(ticket, *pages)
                for page in pages:
                    expected[page] = ticket
                continue
            rank.taker.settle(pages)
            assert [rank.pages.content[p] for p in pages] == [expected[p] for p in pages]
            for page in pages:
                rank.pages.content[page] = expected[page] = -ticket
        rank.taker.settle(range(12))
        assert rank.pages.content == expected
        rank.taker.close()


def test_every_page_that_an_order_names() -> None:
    work = PageWork(clear=[1], copy=[(2, 3)], save=[(4, 90)], load=[(91, 5)])
    assert list(_named_pages(QueryPages(page_work=(work,), pages=(6,)))) == [1, 2, 3, 4, 5, 6]
    step = RunStep(
        epoch=1,
        step=1,
        rows=(),
        micro_batches=[[Slice(7, 0, 3, 1, 0, [8, 9])], [Slice(6, 16, 1, 1, 1, [10])]],
        opened=(),
        closed=(),
        page_work=(work,),
    )
    assert list(_named_pages(step)) == [1, 2, 3, 4, 5, 8, 9, 10]
    assert np.unique(list(_named_pages(step))).size == 8
