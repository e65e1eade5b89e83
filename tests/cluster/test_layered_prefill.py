"""Prompts in groups of layers on ranks: the answers of one process that reads them in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.cluster.control.messages import StepDone
from moe_serve.cluster.steps.step_in_flight import StepInFlight
from moe_serve.config.sections import ClusterConfig, EngineConfig, PipelineConfig
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.layered_prefill import LayeredPrefill, Share
from tests.support.cluster.fault_drive import FaultDrive
from tests.support.cluster.layouts import Answer, colocated, config, on_ranks, requests, serve
from tests.support.cluster.thread_starter import ThreadStarter

VOCAB_SIZE = 4096  # of the demonstration model


def long_requests() -> list[GenerationRequest]:
    """Eight requests with prompts of up to 300 tokens, two of which begin alike."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, VOCAB_SIZE, int(rng.integers(30, 300))).tolist() for _ in range(8)]
    prompts[5] = prompts[2][:150] + prompts[5]
    return [
        replace(each, prompt_token_ids=tuple(prompt))
        for each, prompt in zip(requests(8, VOCAB_SIZE), prompts, strict=True)
    ]


def in_layers(of: EngineConfig) -> EngineConfig:
    return replace(of, scheduler=replace(of.scheduler, layered_prefill="on"))


@pytest.fixture(scope="module")
def in_chunks() -> dict[str, Answer]:
    of = config(1, 1)
    of = replace(of, scheduler=replace(of.scheduler, layered_prefill="off"))
    return colocated(of, long_requests())


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
    in_chunks: dict[str, Answer],
    groups: list[Share],
) -> None:
    of = in_layers(config(attention, experts, micro_batches, **cluster))
    assert on_ranks(of, long_requests()) == in_chunks
    assert len(groups) > 8


def test_one_process_with_few_pages(in_chunks: dict[str, Answer], groups: list[Share]) -> None:
    """Prompts wait for pages, and two micro-batches alternate."""
    of = in_layers(config(1, 1))
    of = replace(of, cluster=ClusterConfig(), cache=replace(of.cache, num_pages=33))
    of = replace(of, model=replace(of.model, max_model_len=512))
    engine = build_engine(replace(of, pipeline=PipelineConfig(micro_batches=2))).engine
    assert serve(engine, long_requests()) == in_chunks
    assert len(groups) > 8 and engine.stats().counts.num_evicted_pages > 0


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
    name: str, in_chunks: dict[str, Answer], groups: list[Share]
) -> None:
    """A lost attention rank takes its parked states with it, and the prompts are read again. A
    lost expert rank takes nothing."""
    with FaultDrive(in_layers(config(2, 2)), ThreadStarter) as drive:
        for num_steps in (2, 5, 9):
            lose_after(drive, num_steps, name)
            assert drive.serve(long_requests()) == in_chunks
            drive.wait_until_complete()
        assert drive.membership.num_lost == 3


def local(of: EngineConfig) -> tuple[Engine, LocalExecutor]:
    built = build_engine(replace(in_layers(of), cluster=ClusterConfig(), pipeline=PipelineConfig()))
    assert isinstance(built.engine, Engine)
    executor = built.engine._executor
    assert isinstance(executor, LocalExecutor)
    return built.engine, executor


def until_parked(engine: Engine) -> list[TokenDelta]:
    """Step until a prompt is parked."""
    deltas = list[TokenDelta]()
    while not engine._scheduler.layered.parked:
        deltas += engine.step()
    return deltas


def spoil(engine: Engine, runner: Any) -> None:
    for states in runner.parked._states.values():
        for state_nD in states.values():
            with torch.inference_mode():
                state_nD[3] = float("nan")


def lose(engine: Engine, runner: Any) -> None:
    runner.parked._states.clear()


def preempt(engine: Engine, runner: Any) -> None:
    (parked,) = engine._scheduler.layered.parked
    (sequence,) = (s for s in engine._scheduler.running if s.id == parked)
    engine._scheduler._preempt(sequence, {})


@pytest.mark.faults
@pytest.mark.parametrize(("hurt", "is_failed"), [(spoil, True), (lose, False), (preempt, False)])
def test_states_that_are_spoiled_lost_or_given_up(
    hurt: Callable[[Engine, Any], None], is_failed: bool, in_chunks: dict[str, Answer]
) -> None:
    """A state that is not finite fails its request alone, as a page does; a state that is lost
    fails none."""
    engine, executor = local(config(1, 1))
    answers = {each.request_id: Answer() for each in long_requests()}
    for each in long_requests():
        engine.add(each)
    deltas = until_parked(engine)
    (parked,) = engine._scheduler.layered.parked
    hurt(engine, executor.runner)
    while engine.has_work:
        deltas += engine.step()
        engine.check_integrity()
    for delta in deltas:
        answers[delta.request_id].take(delta)
    for number, (name, answer) in enumerate(answers.items()):
        if is_failed and number == parked:
            assert answer.end is FinishReason.ERROR and "NaN" in str(answer.error)
        else:
            assert answer == in_chunks[name]
    assert (engine.stats().counts.num_corrupted == 1) == is_failed


def test_an_aborted_prompt_leaves_no_state() -> None:
    engine, executor = local(config(1, 1))
    engine.add(long_requests()[2])
    until_parked(engine)
    runner: Any = executor.runner
    assert runner.parked.num_bytes > 0
    engine.abort("r2")
    assert runner.parked.num_bytes == 0
    engine.step()
    assert not engine.has_work
    engine.check_integrity()
