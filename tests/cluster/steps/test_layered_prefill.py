"""Prompts in groups of layers on ranks: the answers of one process that reads them in chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_serve.cluster.control.messages import StepDone
from moe_serve.cluster.steps.step_in_flight import StepInFlight
from moe_serve.config.sections import SpeculationConfig
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.layered_prefill import LayeredPrefill, Share
from tests.support.cluster.fault_drive import FaultDrive
from tests.support.cluster.layouts import Answer, colocated, config, on_ranks
from tests.support.cluster.thread_starter import ThreadStarter
from tests.support.engine.long_prompts import in_chunks, in_layers, long_requests

VOCAB_SIZE = 4096  # of the demonstration model


def wanted(count: int = 8) -> list[GenerationRequest]:
    """Long prompts with short answers."""
    return [
        replace(each, params=replace(each.params, max_tokens=2 + index % 3))
        for index, each in enumerate(long_requests(VOCAB_SIZE)[:count])
    ]


@pytest.fixture(scope="module")
def answers_in_chunks() -> dict[str, Answer]:
    return colocated(in_chunks(config(1, 1)), wanted())


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Share]:
    """The groups of layers that are scheduled."""
    found: list[Share] = []
    take = LayeredPrefill.take

    def noted(layered: LayeredPrefill, sequence: Sequence, share: Share) -> int:
        if share.layers is not None:
            found.append(share)
        return take(layered, sequence, share)

    monkeypatch.setattr(LayeredPrefill, "take", noted)
    return found


@pytest.mark.parametrize(
    ("attention", "experts", "micro_batches", "cluster"),
    [
        (1, 1, 1, {}),
        (1, 2, 2, {"router": "experts"}),
        (2, 1, 3, {}),
        (1, 1, 1, {"attention_tp": 2}),
    ],
)
def test_layouts(
    attention: int,
    experts: int,
    micro_batches: int,
    cluster: dict[str, Any],
    answers_in_chunks: dict[str, Answer],
    groups: list[Share],
) -> None:
    of = in_layers(config(attention, experts, micro_batches, **cluster))
    assert on_ranks(of, wanted()) == answers_in_chunks
    assert len(groups) > 8


def lose_after(drive: FaultDrive, num_steps: int, name: str) -> None:
    """Lose a rank when its n-th next step has ended, and before anything else is asked."""
    collect, count = drive.coordinator.collect, 0

    def collect_and_lose(flight: StepInFlight) -> dict[str, StepDone | Exception]:
        nonlocal count
        results, count = collect(flight), count + 1
        if count == num_steps:
            drive.membership.give_up(name, "the test took it")
            drive.coordinator.collect = collect  # type: ignore[method-assign]
        return results

    drive.coordinator.collect = collect_and_lose  # type: ignore[method-assign]


@pytest.mark.faults
@pytest.mark.parametrize("name", ["attention-0", "expert-0"])
def test_a_rank_that_is_lost_between_any_two_groups(
    name: str, answers_in_chunks: dict[str, Answer], groups: list[Share]
) -> None:
    """A lost attention rank takes its parked states with it, and the prompts are read again. A
    lost expert rank takes nothing."""
    of = replace(in_layers(config(2, 2)), speculation=SpeculationConfig(method="off"))
    some = wanted(3)
    expected = {each.request_id: answers_in_chunks[each.request_id] for each in some}
    with FaultDrive(of, ThreadStarter) as drive:  # every run has the same steps
        for num_steps in (2, 5, 9):
            lose_after(drive, num_steps, name)
            cold = [replace(each, cache_salt=str(num_steps)) for each in some]
            assert drive.serve(cold) == expected
            drive.wait_until_complete()
        assert drive.membership.num_lost == 3
