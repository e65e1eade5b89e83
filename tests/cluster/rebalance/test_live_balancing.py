"""Experts move while ranks (as threads) serve: no request fails, no token changes."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from experts.placement.problem.placement import Placement
from experts.placement.solvers.search.search_solver import Search
from experts.slot_room import SlotRoom
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.ranks.rank_base import RankPlacement
from moe_serve.cluster.rebalance import expert_copies, proposal, rebalancer
from moe_serve.cluster.rebalance.expert_copies import ExpertCopies
from moe_serve.cluster.rebalance.planner import answer
from moe_serve.cluster.rebalance.rounds import num_copies, rounds
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import EngineConfig
from moe_serve.errors import RebalanceError
from tests.support.cluster.fault_drive import DEADLINE_S, FaultDrive, fault_config, undisturbed
from tests.support.cluster.fault_starter import Faults, FaultStarter
from tests.support.cluster.layouts import Answer, requests, serve
from tests.support.cluster.live_moves import Moves, VersionLog, shuffled
from tests.support.cluster.thread_starter import ThreadStarter

VOCAB_SIZE = 4096  # of the demonstration model
OF = fault_config(2, 3, rebalance="manual", rebalance_max_moves=8)
WANTED = requests(6, VOCAB_SIZE, num_tokens=8)
FEW = WANTED[:3]  # for both attention ranks, greedy and sampled


@pytest.fixture(scope="module")
def expected() -> dict[str, Answer]:
    return undisturbed(OF, WANTED)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    made = Faults(monkeypatch)
    yield made
    made.thawed.set()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> VersionLog:
    return VersionLog(monkeypatch)


def few(expected: dict[str, Answer]) -> dict[str, Answer]:
    return {each.request_id: expected[each.request_id] for each in FEW}


@contextmanager
def moving(faults: Faults, of: EngineConfig = OF) -> Iterator[tuple[Moves, FaultStarter]]:
    made: list[FaultStarter] = []

    def make(*arguments: Any) -> FaultStarter:
        made.append(FaultStarter(faults, *arguments))
        return made[0]

    with FaultDrive(of, make) as drive:
        yield Moves(drive), made[0]


@pytest.mark.parametrize("router", ["attention", "experts"])
def test_moves_under_load(
    faults: Faults, log: VersionLog, expected: dict[str, Answer], router: str
) -> None:
    """Three plans, two rounds each at least, while eight streams run; and replicas come and go."""
    cluster = replace(OF.cluster, router=router, rebalance_spare_slots=1)  # type: ignore[arg-type]
    with moving(faults, replace(OF, cluster=cluster)) as (moves, _):
        targets = [moves.shuffled(seed) for seed in range(3)]
        ranks_of = {
            layer: (tuple(sorted({*experts[0], 2})), *experts[1:])
            for layer, experts in targets[1].ranks_of.items()
        }
        targets[1] = replace(targets[1], ranks_of=ranks_of)
        at = {1: lambda: moves.move_to(*targets)}
        answers = moves.serve(WANTED, at, until=lambda: len(moves.ends) == 3)
        assert answers == expected, "a token changed"
        assert moves.placement == targets[2]
        assert all(end.why is None for end in moves.ends), f"{moves.ends}"
        assert moves.version == sum(end.num_rounds for end in moves.ends) >= 6, f"{moves.ends}"
        assert moves.mover.num_copies >= 3 * 6 * 2 and moves.mover.num_bytes > 0
        assert moves.serve(FEW, {}) == few(expected)
    assert len(log.assert_never_mixed()) > 2, "steps were served by several placements"


# The thread that copies has a name of its own.
@pytest.mark.parametrize(
    ("owner", "function", "rank", "victim", "is_completed"),
    [
        (SlotRoom, "stage", "expert-1 copies", "expert-1", False),
        (RankPlacement, "stage", "expert-2", "expert-2", False),
        (RankPlacement, "stage", "attention-1", "attention-1", False),
        (RankPlacement, "switch", "expert-1", "expert-1", True),
        (RankPlacement, "switch", "attention-0", "attention-0", True),
    ],
)
def test_a_rank_is_lost(
    faults: Faults,
    log: VersionLog,
    expected: dict[str, Answer],
    owner: type,
    function: str,
    rank: str,
    victim: str,
    is_completed: bool,
) -> None:
    """Before the switch nothing has changed, after it everything; a later move goes through."""
    of = replace(OF, cluster=replace(OF.cluster, rebalance_max_moves=64))  # a single round
    with moving(faults, of) as (moves, starter):
        faults.at(owner, function, lambda: starter.crash(victim), rank=rank)
        before, target = moves.placement, moves.shuffled(1)
        at = {4: lambda: moves.mover.propose(target)}
        answers = moves.serve(WANTED, at, until=lambda: bool(moves.ends))
        assert answers == expected, "a token changed"
        assert faults.happened == [f"{rank}: {function}"]
        assert moves.placement == (target if is_completed else before)
        assert (moves.ends[0].why is None) == is_completed, f"{moves.ends}"
        assert moves.drive.membership.num_lost == 1
        moves.drive.wait_until_complete()
        again = moves.shuffled(2)
        at = {2: lambda: moves.mover.propose(again)}
        assert moves.serve(FEW, at, until=lambda: len(moves.ends) == 2) == few(expected)
        assert moves.placement == again, f"{moves.ends}"
    log.assert_never_mixed()


def test_a_rank_is_away_when_the_plan_is_made(
    faults: Faults, expected: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor is held back until the plan has been refused."""
    with moving(faults) as (moves, starter):
        target, held = moves.shuffled(1), list[RankName]()

        def lose() -> None:
            monkeypatch.setattr(starter, "start", held.append)
            starter.crash("expert-1")
            while not moves.drive.membership.num_lost:
                moves.drive.coordinator.settle(is_patient=False)
            moves.mover.propose(target)

        answers = moves.serve(WANTED, {4: lose}, until=lambda: bool(moves.ends))
        assert answers == expected, "a token changed"
        (end,) = moves.ends
        assert end.why == "expert-1 is away" and end.is_refused and moves.version == 0


def test_an_expert_that_cannot_be_read(
    faults: Faults, log: VersionLog, expected: dict[str, Answer]
) -> None:
    """Rolled back in its second round: the first has ended, and stays."""

    def fail() -> None:
        raise OSError(5, "Input/output error")

    with moving(faults) as (moves, _):
        target = moves.shuffled(1)
        first, *_ = rounds(moves.placement, target, OF.cluster.rebalance_max_moves)
        nth = num_copies(first.gained[1]) + 1
        faults.at(ExpertCopies, "_copy", fail, rank="expert-1 copies", time=nth)
        at = {4: lambda: moves.mover.propose(target)}
        answers = moves.serve(WANTED, at, until=lambda: bool(moves.ends))
        assert answers == expected, "a token changed"
        (end,) = moves.ends
        assert end.why == "expert-1 could not read an expert: [Errno 5] Input/output error"
        assert end.num_rounds == moves.version == 1 and moves.placement != target
        assert moves.serve(FEW, {}) == few(expected)
    log.assert_never_mixed()


def test_a_copy_that_hangs_while_the_engine_is_idle(
    faults: Faults, expected: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks and nobody tells anything: the move ends when its time is up even so."""
    read_on, woken = threading.Event(), threading.Event()
    faults.at(
        ExpertCopies, "_copy", lambda: assert_set(read_on), rank="expert-1 copies"
    )  # a disk that does not answer
    with moving(faults) as (moves, _):
        engine, mover = moves.drive.engine, moves.mover
        mover.propose(moves.shuffled(1))
        end = time.monotonic() + DEADLINE_S
        while mover._move is None or mover._move.waiting != {"expert-1"} or engine.has_work:
            assert time.monotonic() < end, f"{moves.ends}"
            engine.step()
        engine.set_waker(woken.set)
        monkeypatch.setattr(mover, "_clock", lambda: time.monotonic() + 1e6)
        assert woken.wait(DEADLINE_S) and engine.has_work, "the engine sleeps on"
        engine.step()
        assert [end.why for end in moves.ends] == ["expert-1 did not read its experts in time"]
        assert not mover.is_moving and not mover.has_news
        assert moves.serve(FEW, {}) == few(expected), "the rank serves while the read hangs"
        monkeypatch.setattr(mover, "_clock", time.monotonic)
        monkeypatch.setattr(expert_copies, "EARLIER_S", 0.05)
        at, before = {2: lambda: mover.propose(moves.shuffled(1))}, moves.placement
        assert moves.serve(FEW, at, until=lambda: len(moves.ends) == 2) == few(expected)
        assert str(moves.ends[1].why).endswith("for an earlier move has not ended")
        assert moves.placement == before and moves.drive.membership.num_lost == 0
        monkeypatch.setattr(expert_copies, "EARLIER_S", DEADLINE_S)
        read_on.set()
        target = moves.shuffled(1)
        at = {2: lambda: mover.propose(target)}
        assert moves.serve(FEW, at, until=lambda: len(moves.ends) == 3) == few(expected)
        assert moves.ends[2].why is None and moves.placement == target


def assert_set(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S), "nobody sets it"


def test_with_an_expert_memory(faults: Faults, expected: dict[str, Answer]) -> None:
    """Nothing is copied: ranks read what rows need, within their budgets."""
    model = replace(OF.model, expert_memory_bytes=40 * 147456)
    with moving(faults, replace(OF, model=model)) as (moves, _):
        target = moves.shuffled(1)
        at = {4: lambda: moves.mover.propose(target)}
        assert moves.serve(WANTED, at, until=lambda: bool(moves.ends)) == expected
        assert moves.placement == target and moves.mover.num_bytes == 0
        assert moves.serve(FEW, {}) == few(expected)


@pytest.mark.timeout(400)  # searches for plans
def test_by_itself(
    expected: dict[str, Answer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From what was counted to a plan and to a move; then, as little is left to gain, to a refusal
    with its numbers.

    The search runs here, because its own process gives way to a busy machine; and nothing is served
    meanwhile, because the steps would take the interpreter's lock from it.
    """
    monkeypatch.setattr(proposal, "STRIDE", 1)
    monkeypatch.setattr(proposal, "CHOICES_PER_EXPERT", 8)
    cluster = replace(
        OF.cluster,
        expert_ranks=2,
        rebalance="auto",
        rebalance_interval_s=0.3,
        rebalance_objective="tokens",
        rebalance_min_gain=0.02,
    )
    caplog.set_level(logging.INFO, logger=rebalancer.__name__)
    built = build_cluster(
        replace(OF, cluster=cluster),
        make_starter=ThreadStarter,
        plan=lambda job: answer(job, Search()),
    )
    assert built.placement is not None
    try:
        num_served = 0
        while not (plans := built.placement.status().num_plans)["moved"] or not (
            plans["gain"] + plans["nothing"]
        ):
            if built.placement.state == "planning":
                time.sleep(0.01)
                continue
            assert num_served < 500, f"{built.placement.status()}"
            assert serve(built.engine, WANTED) == expected, "a token changed"
            num_served += 1
        status = built.placement.status()
        assert status.version > 0 and status.num_copies > 0 and status.num_bytes > 0
        assert status.balance.before is not None and status.balance.predicted is not None
    finally:
        built.engine.close()
    told = [record.getMessage() for record in caplog.records]
    assert any(re.search(r"moved: \d+ copies in \d+ rounds, .* balancedness 0\.", t) for t in told)
    assert any(
        re.search(r": no move: .*balancedness 0.*less for the busiest rank", t) for t in told
    ), told


def given_plan(placement: Placement, held: int = 0) -> Placement:
    """Returns a placement with other experts on each rank; `held` more copies lie on rank 0."""
    made = shuffled(placement, 3)
    extra = [expert for expert in range(made.num_experts) if 0 not in made.ranks_of[1][expert]]
    ranks = list(made.ranks_of[1])
    for expert in extra[:held]:
        ranks[expert] = (0, *ranks[expert])
    return replace(made, ranks_of={**made.ranks_of, 1: tuple(ranks)})


def test_a_given_plan_is_put_into_effect(expected: dict[str, Answer]) -> None:
    """Answers keep their tokens while its experts move, and a plan that does not fit is refused."""
    cluster = replace(OF.cluster, rebalance="manual", rebalance_spare_slots=1)
    built = build_cluster(replace(OF, cluster=cluster), make_starter=ThreadStarter)
    control = built.placement
    assert control is not None
    try:
        before = control.plan()
        refused = {
            "but the model has 32 on 3": replace(before, num_ranks=4),
            r"missing are \[1\]": replace(
                before, ranks_of={k: v for k, v in before.ranks_of.items() if k != 1}
            ),
            "rank 0 13 experts of layer 1, but the rank has 12 slots": given_plan(before, held=2),
        }
        for words, wrong in refused.items():
            with pytest.raises(RebalanceError, match=words):
                control.apply(wrong)
            assert control.plan() == before and control.state == "idle"
        assert control.apply(before).state == "idle"
        last = control.status().last
        assert last is not None and last.outcome == "nothing"
        target = given_plan(before, held=1)
        assert control.apply(target).state == "copying"
        with pytest.raises(RebalanceError, match="already in progress"):
            control.apply(target)
        end = time.monotonic() + DEADLINE_S
        while control.state != "idle":
            assert time.monotonic() < end, f"{control.status()}"
            assert serve(built.engine, WANTED) == expected, "a token changed"
        assert control.plan() == target and control.status().num_plans["moved"] == 1
        assert serve(built.engine, WANTED) == expected
    finally:
        built.engine.close()


def test_a_server_that_moves_nothing_refuses_a_plan() -> None:
    cluster = replace(OF.cluster, rebalance="off")
    built = build_cluster(replace(OF, cluster=cluster), make_starter=ThreadStarter)
    assert built.placement is not None
    try:
        with pytest.raises(RebalanceError, match="cluster.rebalance is 'off'"):
            built.placement.apply(built.placement.plan())
    finally:
        built.engine.close()
