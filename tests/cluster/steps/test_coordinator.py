"""The coordinator: losses between steps, outages, and steps that are repeated."""

from __future__ import annotations

import queue
import re
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moe_serve.cluster.control.rank_name import all_ranks
from moe_serve.cluster.members.roster import Roster
from moe_serve.cluster.steps.coordinator import Coordinator
from moe_serve.cluster.steps.epoch_maker import Epoch
from moe_serve.engine.request.request import FinishReason
from moe_serve.errors import ClusterError
from moe_serve.pipeline.exchange.expert_loop import ExpertLoop
from moe_serve.pipeline.exchange.native_lanes import NativeLanes
from tests.support.cluster.fault_drive import (
    DEADLINE_S,
    OF,
    WANTED,
    assert_recovers,
    driven,
    fault_config,
    undisturbed,
)
from tests.support.cluster.fault_starter import Faults
from tests.support.cluster.layouts import Answer


@pytest.fixture(scope="module")
def expected() -> dict[str, Answer]:
    return undisturbed(OF, WANTED)


class SilentCalls:
    """Ranks of which nothing is ever heard: a wait only moves the clock."""

    def __init__(self) -> None:
        self.now, self.is_stopped = 0.0, False
        self.on_event: object = None

    def clock(self) -> float:
        return self.now

    def next_event(self, timeout_s: float) -> None:
        self.now += timeout_s

    def stop(self) -> None:
        self.is_stopped = True


def without_ranks(calls: SilentCalls, outage_limit_s: float) -> Coordinator:
    """A coordinator whose ranks are all away."""
    membership = SimpleNamespace(
        inbox=queue.SimpleQueue(),
        roster=Roster(all_ranks(1, 1)),
        last_loss="expert-0: it died",
        cell="",
        prefix="",
    )
    mover = SimpleNamespace(has_news=False, call_off=lambda why: None, advance=lambda: None)
    return Coordinator(
        *cast(Any, (membership, calls, SimpleNamespace(can_make=False), None, None, mover)),
        timeout_s=1.0,
        outage_limit_s=outage_limit_s,
    )


def test_an_outage_lasts_by_the_given_clock() -> None:
    calls = SilentCalls()
    calls.now = 500.0
    coordinator = without_ranks(calls, outage_limit_s=60.0)
    assert coordinator.outage_s == 0.0
    assert not coordinator.settle(is_patient=False), "it waits a moment only"
    assert 0.0 < coordinator.outage_s < 1.0
    calls.now = 542.0
    assert coordinator.outage_s == 42.0


def test_an_outage_ends_the_server_when_it_lasts_longer_than_a_start_may() -> None:
    calls = SilentCalls()
    coordinator = without_ranks(calls, outage_limit_s=3600.0)
    with pytest.raises(ClusterError, match="for 3600 s; the last loss: expert-0: it died"):
        coordinator.settle(is_patient=True)
    assert calls.now == pytest.approx(3600.0, abs=1.0), "of the clock, in no real time"


def test_a_stop_ends_the_wait_for_ranks() -> None:
    coordinator = without_ranks(SilentCalls(), outage_limit_s=60.0)
    coordinator.stop()
    with pytest.raises(ClusterError, match="the start was cancelled"):
        coordinator.settle(is_patient=True)
    coordinator._epoch = Epoch(1)
    assert not coordinator.settle(is_patient=True)


def test_lost_and_back_before_anybody_looks(faults: Faults, expected: dict[str, Answer]) -> None:
    """The engine sees the same names in the epoch, but pages and prefixes are gone."""
    with driven(faults) as (drive, starter):
        assert drive.serve(WANTED) == expected
        for name in ("attention-0", "attention-1", "expert-0", "expert-1", "expert-2"):
            starter.crash(name)
        assert_recovers(drive, expected, num_lost=5)


def test_requests_wait_while_a_pool_is_empty(faults: Faults, expected: dict[str, Answer]) -> None:
    """New ones are taken, aborted ones leave, and the engine's thread is never held for long."""
    with driven(faults, fault_config(1, 1)) as (drive, starter):
        drive.wait_until_complete()
        start = starter.start
        starter.start = lambda rank: None  # type: ignore[method-assign,assignment]
        starter.crash("attention-0")
        end = time.monotonic() + DEADLINE_S
        while drive.engine.stats().outage_s == 0:
            assert time.monotonic() < end, "nobody noticed"
            drive.engine.step()
        answers = {request.request_id: Answer() for request in WANTED}
        for request in WANTED:
            drive.engine.add(request)
        drive.engine.abort("r3")
        (aborted,) = drive.engine.step()
        assert (aborted.request_id, aborted.finish_reason) == ("r3", FinishReason.ABORT)
        stats = drive.engine.stats()
        assert stats.outage_s > 0 and stats.load.num_waiting == len(WANTED) - 1
        starter.start = start  # type: ignore[method-assign]
        starter.start(drive.state("attention-0").name)
        del answers["r3"]
        while any(answer.end is None for answer in answers.values()):
            assert time.monotonic() < end, "hangs"
            for delta in drive.engine.step():
                answers[delta.request_id].take(delta)
        assert drive.engine.stats().outage_s == 0
    assert answers == {name: answer for name, answer in expected.items() if name != "r3"}


def test_a_step_is_repeated_with_a_report(
    faults: Faults,
    expected: dict[str, Answer],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which rank, which step, which layer, which micro-batch, which operation."""
    monkeypatch.setattr(NativeLanes, "is_usable", False)  # a native call of a step has no _serve
    faults.at(ExpertLoop, "_serve", faults.die, rank="expert-1", time=20)
    with driven(faults) as (drive, _):
        assert drive.serve(WANTED) == expected
    line = next(
        text for text in caplog.messages if "is repeated" in text
    )  # a step ahead may follow
    operation = r"(dispatch|combine) of step \d+, layer \d+, micro-batch \d+\)"
    assert re.search(rf"^step \d+ is repeated: .*expert-1 is lost \({operation}: ", line), line
