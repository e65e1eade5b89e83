"""Prompts in groups of layers in one process give the answers of chunks, also when interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_serve.config.sections import (
    ClusterConfig,
    EngineConfig,
    PipelineConfig,
    SpeculationConfig,
)
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import FinishReason, TokenDelta
from tests.support.cluster.layouts import Answer, colocated, config, serve
from tests.support.engine.long_prompts import in_chunks, in_layers, long_requests

VOCAB_SIZE = 300  # of the tiny models


@pytest.fixture(scope="module")
def of(checkpoints: dict[str, Path]) -> EngineConfig:
    return config(1, 1, folder=checkpoints["qwen3_moe"])


@pytest.fixture(scope="module")
def answers_in_chunks(of: EngineConfig) -> dict[str, Answer]:
    return colocated(in_chunks(of), long_requests(VOCAB_SIZE))


def test_the_demonstration_model_with_few_pages() -> None:
    """Prompts wait for pages, and two micro-batches alternate. Its layers are more than two
    groups."""
    wanted = long_requests(4096)
    of = in_layers(config(1, 1))
    of = replace(of, cluster=ClusterConfig(), cache=replace(of.cache, num_pages=33))
    of = replace(of, model=replace(of.model, max_model_len=512))
    engine = build_engine(replace(of, pipeline=PipelineConfig(micro_batches=2))).engine
    assert serve(engine, wanted) == colocated(in_chunks(config(1, 1)), wanted)
    assert engine.stats().counts.num_evicted_pages > 0


def local(of: EngineConfig) -> tuple[Engine, LocalExecutor]:
    built = build_engine(replace(in_layers(of), cluster=ClusterConfig(), pipeline=PipelineConfig()))
    assert isinstance(built.engine, Engine)
    executor = built.engine._executor
    assert isinstance(executor, LocalExecutor)
    return built.engine, executor


def until_parked(engine: Engine) -> list[TokenDelta]:
    """Steps until a prompt is parked."""
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
    hurt: Callable[[Engine, Any], None],
    is_failed: bool,
    of: EngineConfig,
    answers_in_chunks: dict[str, Answer],
) -> None:
    """A state that is not finite fails its own request, as a page does; a lost state fails no
    request."""
    engine, executor = local(of)
    answers = {each.request_id: Answer() for each in long_requests(VOCAB_SIZE)}
    for each in long_requests(VOCAB_SIZE):
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
            assert answer == answers_in_chunks[name]
    assert (engine.stats().counts.num_corrupted == 1) == is_failed


def test_an_aborted_prompt_leaves_no_state(of: EngineConfig) -> None:
    engine, executor = local(of)
    engine.add(long_requests(VOCAB_SIZE)[2])
    until_parked(engine)
    runner: Any = executor.runner
    assert runner.parked.num_bytes > 0
    engine.abort("r2")
    assert runner.parked.num_bytes == 0
    engine.step()
    assert not engine.has_work
    engine.check_integrity()


def test_drafts_between_groups_of_layers(
    of: EngineConfig, answers_in_chunks: dict[str, Answer]
) -> None:
    """Requests that draft decode beside parked prompts. A group uses its step's budget, so drafts
    are verified in the steps between."""
    engine, executor = local(replace(of, speculation=SpeculationConfig(method="auto")))
    looping = replace(long_requests(VOCAB_SIZE)[0], request_id="loop")
    params = replace(looping.params, max_tokens=80, temperature=0.0)
    engine.add(replace(looping, params=params, prompt_token_ids=(5, 6, 7) * 20))
    answers = {each.request_id: Answer() for each in long_requests(VOCAB_SIZE)}
    for each in long_requests(VOCAB_SIZE):
        engine.add(each)
    num_groups = num_beside = 0
    while engine.has_work:
        for delta in engine.step():
            if delta.request_id in answers:
                answers[delta.request_id].take(delta)
        slices = [] if executor.plan is None else executor.plan.slices
        if any(piece.layers for piece in slices):
            num_groups += 1
            num_beside += any(piece.sequence_id == 0 for piece in slices)
    assert answers == answers_in_chunks
    assert num_beside > 8 and num_groups > num_beside // 2
    assert engine.stats().counts.drafts.total.num_drafted > 0


@pytest.mark.parametrize("variant", ["mixtral-window", "qwen3_moe-biased"])
def test_small_models_with_few_pages(variant: str, checkpoints: dict[str, Path]) -> None:
    """A model whose layers all have a window gives pages back while prompts are parked; the other
    one has to preempt."""
    of = config(1, 1, 1, folder=checkpoints[variant], budget=24, dtype="float32")
    of = replace(of, cluster=ClusterConfig(), cache=replace(of.cache, num_pages=26))
    of = replace(of, model=replace(of.model, max_model_len=400))
    wanted = [
        replace(each, params=replace(each.params, max_tokens=40))
        for each in long_requests(VOCAB_SIZE)
    ]
    engines = [build_engine(each).engine for each in (in_chunks(of), in_layers(of))]
    chunks, layers = (serve(engine, wanted) for engine in engines)
    assert layers == chunks
    assert (engines[1].stats().counts.num_preemptions > 0) == (variant != "mixtral-window")
