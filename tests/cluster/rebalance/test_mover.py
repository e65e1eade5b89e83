"""What ranks are told in a move, whoever answers when: nobody switches before all are ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.placement.placement_error import PlacementError
from experts.placement.problem.placement import Placement, contiguous
from moe_serve.cluster.control.messages import Order
from moe_serve.cluster.control.placement_messages import (
    DropPlacement,
    Staged,
    StagePlacement,
    SwitchPlacement,
)
from moe_serve.cluster.control.rank_name import all_ranks
from moe_serve.cluster.members.current_placement import CurrentPlacement
from moe_serve.cluster.members.roster import RankPhase, Roster
from moe_serve.cluster.rebalance.mover import MoveEnd, Mover, MoverLimits
from moe_serve.cluster.rebalance.rounds import changed_layers, rounds
from tests.support.cluster.live_moves import shuffled

NAMES = ("attention-0", "expert-0", "expert-1", "expert-2")
LAYERS = range(4)
START = contiguous(LAYERS, 9, 3)


class Bench:
    """A mover, and what it said to whom."""

    def __init__(self, room: int = 4) -> None:
        self.roster = Roster(all_ranks(1, 3))
        for state in self.roster.all():
            state.phase = RankPhase.SERVING
        self.sent: list[tuple[str, Order]] = []
        self.ends: list[MoveEnd] = []
        self.now = 0.0
        self.current = CurrentPlacement(START)
        self.told: list[Placement] = []  # to who follows the placement
        self.current.on_switch(self.told.append)
        limits = MoverLimits(room=room, bytes_per_s=1000, expert_bytes=1000)
        self.mover = Mover(
            self.roster, lambda *told: self.sent.append(told), self.current, limits, self.clock
        )
        self.mover.on_end = self.ends.append

    def clock(self) -> float:
        return self.now

    def staged(self) -> int:
        """The number of the placement that was told of last."""
        orders = [order for _, order in self.sent if isinstance(order, StagePlacement)]
        return orders[-1].placement

    def answer(self, names: Sequence[str] = NAMES, why: str | None = None) -> None:
        number = self.staged()
        for name in names:
            self.mover.heard(name, Staged(placement=number, num_bytes=10, why=why))

    def kinds(self) -> list[str]:
        """What was sent, alike orders to several ranks once."""
        kinds = [type(order).__name__ for _, order in self.sent]
        return [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]


def test_a_move_in_two_rounds() -> None:
    bench, target = Bench(), shuffled(START, 1)
    assert len(rounds(START, target, 4)) == 2
    bench.mover.propose(target)
    assert bench.mover.has_news
    bench.mover.advance()
    assert bench.mover.is_moving and not bench.mover.has_news
    bench.answer(NAMES[:3])
    bench.mover.advance()
    assert bench.current.version.number == 0 and bench.kinds() == ["StagePlacement"]
    bench.answer(NAMES[3:])
    bench.mover.advance()
    assert bench.current.version.number == bench.staged() - 1 == 1
    bench.answer()
    bench.mover.advance()
    assert bench.current.version.placement == target and not bench.mover.is_moving
    assert bench.kinds() == ["StagePlacement", "SwitchPlacement"] * 2
    assert len(bench.told) == 2 and bench.told[-1] == target
    (end,) = bench.ends
    assert end.why is None and end.num_rounds == 2
    num_moved = sum(each.num_copies for each in rounds(START, target, 4))
    assert end.num_copies == bench.mover.num_copies == num_moved > 0
    assert bench.mover.num_bytes == 2 * len(NAMES) * 10


def test_ranks_are_told_what_is_theirs() -> None:
    bench = Bench()
    ranks_of = dict(START.ranks_of) | {2: ((1,), *START.ranks_of[2][1:])}
    bench.mover.propose(replace(START, ranks_of=ranks_of))
    bench.mover.advance()
    told = {name: order for name, order in bench.sent if isinstance(order, StagePlacement)}
    assert told.keys() == set(NAMES)
    assert all(order.ranks_of == {2: ranks_of[2]} for order in told.values())
    assert told["expert-1"].gained == {2: [0]} and told["expert-1"].held == {2: [0, 3, 4, 5]}
    assert told["expert-0"].gained == {} and told["expert-0"].held == {2: [1, 2]}
    assert told["attention-0"].gained == told["attention-0"].held == {}


@pytest.mark.parametrize("what", ["lost", "unable", "late"])
def test_called_off(what: str) -> None:
    """All are told to drop it; answers that come late mean nothing; the next move goes through."""
    bench, target = Bench(room=64), shuffled(START, 1)
    bench.mover.propose(target)
    bench.mover.advance()
    bench.answer(NAMES[:2])
    if what == "lost":
        bench.mover.call_off("expert-2 is lost")
    elif what == "unable":
        bench.answer(["expert-2"], why="No space left on device")
    else:
        bench.now = 59.0
        bench.mover.advance()
        assert bench.mover.is_moving
        bench.now = 1000.0
        bench.mover.advance()
    assert not bench.mover.is_moving and bench.current.version.number == 0
    assert bench.kinds() == ["StagePlacement", "DropPlacement"]
    assert {"lost": "is lost", "unable": "No space", "late": "in time"}[what] in str(bench.ends)
    bench.answer()
    bench.mover.advance()
    assert bench.current.version.number == 0, "of the one that was called off"
    bench.mover.propose(target)
    bench.mover.advance()
    bench.answer()
    bench.mover.advance()
    assert bench.current.version.placement == target and bench.current.version.number == 2


def test_an_idle_engine_is_told_that_it_goes_on() -> None:
    """When the last answer came within a step, and when the time of a round is up."""
    bench = Bench(room=64)
    bench.mover.propose(shuffled(START, 1))
    bench.mover.advance()
    bench.answer(NAMES[:3])
    assert not bench.mover.has_news, "a rank still reads"
    bench.now = 1000.0
    assert bench.mover.has_news, "its time is up"
    bench.now = 0.0
    bench.answer(NAMES[3:])
    assert bench.mover.has_news, "all are ready"
    bench.mover.advance()
    assert not bench.mover.has_news and not bench.mover.is_moving


def test_nothing_begins_while_somebody_is_away() -> None:
    bench = Bench()
    bench.roster["expert-1"].phase = RankPhase.LOADING
    bench.mover.propose(shuffled(START, 1))
    bench.mover.advance()
    assert not bench.sent and not bench.mover.is_moving
    assert bench.ends[0].is_refused and bench.ends[0].why == "expert-1 is away"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*NAMES, "advance", "lost", "propose"]), max_size=60))
def test_whatever_comes_when(events: list[str]) -> None:
    """A switch to a placement follows an answer of every rank, and none follows its end."""
    bench, ready, dropped = Bench(), dict[int, set[str]](), set[int]()
    for seed, event in enumerate(events):
        if event == "propose":
            bench.mover.propose(shuffled(START, seed))
        elif event == "advance":
            bench.mover.advance()
        elif event == "lost":
            if bench.mover.is_moving:
                dropped.add(bench.staged())
            bench.mover.call_off("somebody is lost")
        elif any(isinstance(order, StagePlacement) for _, order in bench.sent):
            ready.setdefault(bench.staged(), set()).add(event)
            bench.answer([event])
    switched = [order.placement for _, order in bench.sent if isinstance(order, SwitchPlacement)]
    assert switched == sorted(switched), "versions grow"
    assert all(ready[number] == set(NAMES) for number in switched)
    assert not dropped & set(switched)
    assert bench.current.version.number == (switched[-1] if switched else 0)
    num_drops = sum(isinstance(order, DropPlacement) for _, order in bench.sent)
    assert num_drops == len(dropped) * len(NAMES)


def test_rounds_by_hand() -> None:
    """The docstring's example: rank 0 gains one copy in layers 0 and 1 each, two in layer 2."""
    before = contiguous(range(3), 4, 2)
    more = {0: 1, 1: 1, 2: 2}
    ranks_of = {
        layer: tuple((0, 1) if 2 <= e < 2 + more[layer] else ranks for e, ranks in enumerate(each))
        for layer, each in before.ranks_of.items()
    }
    after = replace(before, ranks_of=ranks_of)
    first, last = rounds(before, after, room=2)
    assert list(first.ranks_of) == [0, 1] and list(last.ranks_of) == [2]
    assert first.gained == [{0: [2], 1: [2]}, {}] and last.gained == [{2: [2, 3]}, {}]
    assert last.held == [{2: [0, 1, 2, 3]}, {2: [2, 3]}]
    assert (first.num_copies, last.most_copies) == (2, 2)
    assert last.placement == after and rounds(before, before, room=2) == []
    each = rounds(before, after, room=1)
    assert [step.gained[0] for step in each] == [{0: [2]}, {1: [2]}, {2: [2]}, {2: [3]}]
    assert each[-1].placement == after
    with pytest.raises(PlacementError, match="rebalance_max_moves is 0"):
        rounds(before, after, room=0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_rounds_lead_there_and_fit(seed: int, room: int) -> None:
    """A rank has 3 of 9 experts, and gains 3 others and a replica at most. On the way no rank holds
    more of a layer than before or after all of it."""
    after, at = replicated(shuffled(START, seed), seed), START
    first, last = START, after
    for each in rounds(START, after, room):
        assert each.most_copies <= room and not each.placement.lost
        for rank in range(3):
            before, then = at.held_by(rank), each.placement.held_by(rank)
            for layer, experts in then.items():
                ends = (first.held_by(rank)[layer], last.held_by(rank)[layer])
                assert len(experts) <= max(map(len, ends))
            assert each.held[rank] == {layer: then[layer] for layer in each.ranks_of}
            gained = {layer: sorted(set(then[layer]) - set(before[layer])) for layer in then}
            assert each.gained[rank] == {layer: ids for layer, ids in gained.items() if ids}
        at = each.placement
    assert not changed_layers(at, after)


def test_a_plan_for_a_placement_that_is_past_is_refused() -> None:
    bench = Bench(room=64)
    bench.mover.propose(shuffled(START, 1))
    bench.mover.propose(shuffled(START, 2))
    bench.mover.advance()
    bench.answer()
    bench.mover.advance()
    bench.mover.advance()
    assert [end.is_refused for end in bench.ends] == [False, True]
    assert bench.current.version.placement == shuffled(START, 1)


def replicated(placement: Placement, seed: int) -> Placement:
    """One expert of each layer on all ranks."""
    rng = np.random.default_rng(seed)
    ranks_of = {}
    for layer, experts in placement.ranks_of.items():
        which = int(rng.integers(len(experts)))
        all_of_them = tuple(range(placement.num_ranks))
        ranks_of[layer] = (*experts[:which], all_of_them, *experts[which + 1 :])
    return replace(placement, ranks_of=ranks_of)
