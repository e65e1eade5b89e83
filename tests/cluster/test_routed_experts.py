"""The experts that come with tokens are the same in every layout, whatever befell it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.build import build_engine
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.request import GenerationRequest, TokenExperts
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.model.step_plan import StepPlan
from tests.support.cluster.layouts import config, requests
from tests.support.cluster.thread_starter import ThreadStarter

VOCAB_SIZE, NUM_LAYERS, NUM_EXPERTS, TOP_K = 4096, 6, 32, 4
Told = dict[str, list[tuple[int, TokenExperts]]]


def asked(count: int = 7, num_tokens: int = 8) -> list[GenerationRequest]:
    """All but the last want their experts."""
    wanted = requests(count, VOCAB_SIZE, num_tokens)
    return [replace(r, wants_routed_experts=i < count - 1) for i, r in enumerate(wanted)]


def run(engine: DrivenEngine, wanted: Sequence[GenerationRequest]) -> Told:
    """Token and experts, of those who asked; the others get none. Who drafted a token is left out,
    because that depends on the times of steps."""
    told: Told = {request.request_id: [] for request in wanted}
    asking = {request.request_id: request.wants_routed_experts for request in wanted}
    for request in wanted:
        engine.add(request)
    num_open = len(wanted)
    while num_open:
        for delta in engine.step():
            assert delta.error is None
            num_open -= delta.finish_reason is not None
            if not asking[delta.request_id]:
                assert delta.routed_experts is None, "nobody asked"
                continue
            assert delta.routed_experts is not None
            experts = [replace(each, drafter="") for each in delta.routed_experts]
            told[delta.request_id] += zip(delta.token_ids, experts, strict=True)
    return told


def told_by(of: EngineConfig, wanted: Sequence[GenerationRequest]) -> Told:
    is_split = of.cluster.is_disaggregated
    built = build_cluster(of, make_starter=ThreadStarter) if is_split else build_engine(of)
    try:
        return run(built.engine, wanted)
    finally:
        built.engine.close()


@pytest.fixture(scope="module")
def alone() -> Told:
    """Of one process, without prefix cache."""
    of = config(0, 0, 1)
    return told_by(replace(of, cache=replace(of.cache, prefix_cache=False)), asked())


def test_each_token_comes_with_k_experts_of_each_layer(alone: Told) -> None:
    for request in asked()[:-1]:
        told = alone[request.request_id]
        assert len(told) == request.params.max_tokens
        for _, experts in told:
            lists = experts.lists()
            assert [len(set(ids)) for ids in lists] == [TOP_K] * NUM_LAYERS
            assert all(0 <= expert < NUM_EXPERTS for ids in lists for expert in ids)
    assert len({experts for told in alone.values() for _, experts in told}) > 20, "all alike"


def test_they_are_those_of_the_row_before_the_token(alone: Told) -> None:
    """A prompt that is longer by the first token, computed alone, chooses the second's experts."""
    request = asked()[0]
    (first, _), (second, experts) = alone["r0"][:2]
    longer = replace(
        request,
        prompt_token_ids=(*request.prompt_token_ids, first),
        params=replace(request.params, max_tokens=1, temperature=0.0),
    )
    assert told_by(config(0, 0, 1), [longer])["r0"] == [(second, experts)]


@pytest.mark.parametrize(
    ("attention", "experts", "micro_batches", "router"),
    [(0, 0, 3, "auto"), (1, 1, 2, "experts"), (2, 1, 2, "attention")],
)
def test_layouts_tell_the_same(
    alone: Told, attention: int, experts: int, micro_batches: int, router: str
) -> None:
    """With the prefix cache: what is cached is not computed, but the row of a token always is."""
    assert told_by(config(attention, experts, micro_batches, router=router), asked()) == alone


def test_after_preemptions_and_from_cached_prefixes() -> None:
    """Six sequences of up to 120 tokens in 20 pages of 16: some are computed again."""
    wanted = [r for r in asked(7, 24) if len(r.prompt_token_ids) < 96]
    of = config(0, 0, 1)
    plenty, scarce = build_engine(of), replace(of, cache=replace(of.cache, num_pages=20))
    scarce = replace(scarce, model=replace(of.model, max_model_len=256))
    expected = run(plenty.engine, wanted)
    again = [replace(request, request_id=f"again-{request.request_id}") for request in wanted]
    assert list(run(plenty.engine, again).values()) == list(expected.values())
    assert plenty.engine.stats().counts.num_hit_tokens > 0
    tight = build_engine(scarce)
    assert run(tight.engine, wanted) == expected
    assert tight.engine.stats().counts.num_preemptions > 0


def test_a_step_that_failed_as_a_whole_is_told_of_too(alone: Told) -> None:
    built = build_engine(config(0, 0, 1))
    engine = built.engine
    assert isinstance(engine, Engine)
    executor: Any = engine._executor
    compute, failures = executor.run, iter([3, 4])

    def run_or_fail(plan: StepPlan, sequences: Mapping[int, EngineSequence]) -> StepOutcome:
        if len(sequences) > 1 and next(failures, None):
            raise RuntimeError("the step is broken")
        outcome: StepOutcome = compute(plan, sequences)
        return outcome

    executor.run = run_or_fail
    assert run(engine, asked()) == alone
    assert next(failures, None) is None, "two steps failed"


def test_wide_ids_are_told_as_they_are() -> None:
    """More than 256 experts: two bytes each."""
    ids = (300).to_bytes(2, "little") + (7).to_bytes(2, "little")
    assert TokenExperts(ids, 2, 1, is_wide=True).lists() == [[300], [7]]
    assert TokenExperts(b"", 0, 0).lists() == []
