"""Ranks that are lost at awkward moments, as threads: no token is lost, no request hangs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from moe_serve.cluster.control import epoch
from moe_serve.cluster.control.messages import FinitePages, Join, StepDone, StepFailed
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.ranks import attention_rank
from moe_serve.cluster.ranks.attention_rank import AttentionRank
from moe_serve.cluster.ranks.expert_rank import ExpertRank
from moe_serve.cluster.steps.step_in_flight import StepInFlight
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.request import FinishReason, TokenDelta
from moe_serve.engine.request.sequence import Sequence
from moe_serve.errors import ClusterError
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.exchange.expert_loop import ExpertLoop
from moe_serve.pipeline.exchange.step_shape import StepShape
from moe_serve.pipeline.links.data_group import DataGroup
from moe_serve.pipeline.links.shard_group import ShardLostError
from moe_serve.pipeline.links.transfer import PeerLostError
from tests.support.cluster.fault_drive import FaultDrive, undisturbed
from tests.support.cluster.layouts import config, requests
from tests.support.cluster.thread_starter import ThreadStarter

VOCAB_SIZE = 4096  # of the demonstration model
OF = config(2, 1)


@pytest.fixture
def drive() -> Iterator[FaultDrive]:
    with FaultDrive(OF, ThreadStarter) as opened:
        yield opened


def lose_after(drive: FaultDrive, num_steps: int, name: str) -> None:
    """A rank is gone when its n-th step's tokens are here, and before anything else is asked."""
    collect, count = drive.coordinator.collect, 0

    def collect_and_lose(flight: StepInFlight) -> dict[str, StepDone | Exception]:
        nonlocal count
        results = collect(flight)
        count += 1
        if count == num_steps:
            drive.membership.give_up(name, "the test took it")
        return results

    drive.coordinator.collect = collect_and_lose  # type: ignore[method-assign]


@pytest.mark.parametrize("num_steps", [11, 12])
def test_tokens_that_came_are_told(drive: FaultDrive, num_steps: int) -> None:
    """Requests end in these steps, so the rank is asked for their pages; others go on."""
    wanted = requests(6, VOCAB_SIZE)
    lose_after(drive, num_steps, "attention-0")
    assert drive.serve(wanted) == undisturbed(OF, wanted)
    assert drive.membership.num_lost == 1


def test_a_request_is_aborted_on_a_lost_rank(drive: FaultDrive) -> None:
    for request in requests(6, VOCAB_SIZE, num_tokens=40):
        drive.engine.add(request)
    deltas: list[TokenDelta] = []
    for _ in range(5):
        deltas += drive.engine.step()
    drive.membership.give_up("attention-0", "the test took it")
    drive.membership.give_up("attention-1", "the test took it")
    for index in range(6):
        drive.engine.abort(f"r{index}")
    while drive.engine.num_running or drive.engine.num_waiting or drive.engine.has_work:
        deltas += drive.engine.step()
    ends = [(d.request_id, d.finish_reason) for d in deltas if d.finish_reason is not None]
    assert sorted(ends) == [(f"r{index}", FinishReason.ABORT) for index in range(6)]


def test_requests_are_taken_while_no_rank_is_there(drive: FaultDrive) -> None:
    """Nobody waits in `add`: one command behind the other, aborts among them."""
    wanted = requests(5, VOCAB_SIZE)
    settle = drive.coordinator.settle

    def never(*, is_patient: bool) -> bool:
        raise AssertionError("it waits")

    drive.coordinator.settle = never  # type: ignore[method-assign]
    for request in wanted:
        drive.engine.add(request)
    drive.engine.abort("r3")
    assert drive.engine.num_waiting == 4 and drive.engine.has_work
    drive.coordinator.settle = settle  # type: ignore[method-assign]
    deltas = drive.engine.step()
    assert FinishReason.ABORT in {d.finish_reason for d in deltas if d.request_id == "r3"}
    while drive.engine.num_running or drive.engine.num_waiting:
        deltas += drive.engine.step()
    ended = {d.request_id for d in deltas if d.finish_reason is FinishReason.LENGTH}
    assert ended == {"r0", "r1", "r2", "r4"}


def test_a_process_that_cannot_be_killed_is_left_behind(drive: FaultDrive) -> None:
    """It is stuck in the kernel. Nobody listens to it any more, and another one is started."""
    wanted = requests(4, VOCAB_SIZE)
    starter = drive.membership._starter
    assert isinstance(starter, ThreadStarter)
    kill = starter.kill

    def fail(rank: RankName) -> None:
        kill(rank)
        raise ClusterError(f"{rank} does not end")

    starter.kill = fail  # type: ignore[method-assign]
    answers = drive.serve(wanted, lambda: drive.membership.give_up("attention-0", "the test"))
    assert answers == undisturbed(OF, wanted)
    drive.wait_until_complete()


def test_who_waits_for_a_stuck_rank_is_not_given_up_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member that does not come keeps the others waiting for as long as they may, not longer."""
    released = threading.Event()

    def meet_but_one(join: Join, me: str, *rest: Any) -> DataGroup:
        if me == "attention-0" and join.epoch == 2:
            released.wait(60)
            raise PeerLostError(me, "meeting", "too late")
        return epoch.meet(join, me, *rest)

    monkeypatch.setattr(attention_rank, "meet", meet_but_one)
    with FaultDrive(config(2, 1, timeout_s=2.0), ThreadStarter) as drive:
        drive.coordinator._torn_by = "the test"
        while drive.coordinator.epoch.number < 3:
            drive.engine.step()
        assert drive.hurt.detected.keys() == {"attention-0"}
        released.set()
        drive.wait_until_complete()


@pytest.mark.parametrize("what", ["tokens", "pages", "records"])
def test_a_rank_that_answers_nonsense_costs_no_server(drive: FaultDrive, what: str) -> None:
    link = drive.state("attention-0").link
    assert link is not None
    receive = link._channel.receive

    def spoilt(timeout_s: float) -> Any:
        report = receive(timeout_s)
        if what == "tokens" and isinstance(report, StepDone) and report.sampled:
            return msgspec.structs.replace(report, sampled={})
        if what == "pages" and isinstance(report, FinitePages):
            return msgspec.structs.replace(report, is_finite=[])
        if what == "records" and isinstance(report, StepDone):
            return msgspec.structs.replace(report, records=b"nonsense")
        return report

    link._channel.receive = spoilt  # type: ignore[method-assign]
    wanted = requests(5, VOCAB_SIZE)
    answers, expected = drive.serve(wanted), undisturbed(OF, wanted)
    failed = {name for name, answer in answers.items() if answer.error is not None}
    assert {n: a for n, a in answers.items() if n not in failed} == {
        n: a for n, a in expected.items() if n not in failed
    }
    assert bool(failed) == (what == "tokens")
    assert drive.membership.num_lost == (what == "pages")


def test_who_fails_with_others_and_kills_ranks_alone_does_not_go_on_for_ever(
    drive: FaultDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a step that failed everybody runs alone; ranks lost then count like others."""
    run = LocalExecutor.run

    def run_or_die(
        self: LocalExecutor, plan: StepPlan, sequences: Mapping[int, Sequence]
    ) -> StepOutcome:
        ids = [piece.sequence_id for piece in plan.slices]
        if 0 in ids and len(ids) > 1:
            raise RuntimeError("poison")
        if 0 in ids:
            raise ShardLostError("poison")  # which ends a rank
        return run(self, plan, sequences)

    wanted = requests(5, VOCAB_SIZE, num_tokens=30)
    expected = undisturbed(OF, wanted)
    monkeypatch.setattr(LocalExecutor, "run", run_or_die)
    answers = drive.serve(wanted)
    assert answers.pop("r0").error == (
        "6 attention ranks were lost while they computed its next token"
    )
    assert answers == {name: expected[name] for name in answers}


def test_after_a_step_that_failed_a_rank_is_at_nothing(
    drive: FaultDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats go into reports of hangs, where it would seem to hang in that step."""
    run, is_first = ExpertLoop.run, itertools.count()
    left: list[tuple[str, object]] = []

    def lose_once(loop: ExpertLoop, shape: StepShape) -> None:
        if next(is_first) == 5:
            raise PeerLostError("attention-0", "dispatch", "the test says so")
        run(loop, shape)

    def noted(handle: Any) -> Any:
        def handled(rank: Any, order: object) -> Any:
            report = handle(rank, order)
            if isinstance(report, StepFailed):
                left.append((str(rank._name), rank.operation))
            return report

        return handled

    monkeypatch.setattr(ExpertLoop, "run", lose_once)
    for role in (AttentionRank, ExpertRank):
        monkeypatch.setattr(role, "handle", noted(role.handle))
    wanted = requests(4, VOCAB_SIZE)
    assert drive.serve(wanted) == undisturbed(OF, wanted)
    assert {name.split("-")[0] for name, _ in left} == {"attention", "expert"}
    assert [operation for _, operation in left] == [None] * len(left)
