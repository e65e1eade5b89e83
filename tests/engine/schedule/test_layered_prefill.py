"""Prompts in groups of layers: each prompt's groups, its budget, and interruptions."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.config.sections import (
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.opened_model import ServedCheckpoint
from moe_serve.engine.request.request import DecodingRules, FinishReason
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.schedule.layered_costs import LayeredCosts
from moe_serve.engine.schedule.layered_prefill import LayeredPrefill
from moe_serve.model.step_plan import LayerRange, StepPlan
from tests.support.engine.fake_engine import request, run, tokens
from tests.support.engine.fake_runner import FakeRunner, continuation

LAYERS = 8
COSTS = LayeredCosts(num_layers=LAYERS, num_experts=128, top_k=8, read_rows=5.0, dense_rows=2.0)
LONG = [5 + place % 40 for place in range(120)]


def layered_engine(
    runner: FakeRunner, *, budget: int = 24, num_pages: int = 64, parked_bytes: int = 1 << 20
) -> Engine:
    return Engine(
        LocalExecutor(runner, Sampler(frozenset())),
        scheduler=SchedulerConfig(max_num_seqs=8, max_batched_tokens=budget),
        num_pages=num_pages,
        page_size=runner.page_size,
        micro_batches=1,
        max_model_len=160,
        eos_token_ids=frozenset(),
        layered=LayeredPrefill(COSTS, "on", parked_bytes, 4),
    )


def groups(plans: list[StepPlan]) -> dict[int, list[tuple[int, LayerRange]]]:
    """Returns the tokens and layers of each sequence's groups."""
    found: dict[int, list[tuple[int, LayerRange]]] = {}
    for plan in plans:
        for piece in plan.slices:
            if piece.layers is not None:
                assert piece.num_logits == 0 or piece.layers.is_last
                found.setdefault(piece.sequence_id, []).append((len(piece.token_ids), piece.layers))
    return found


def test_a_long_prompt_passes_all_layers_in_order_and_once() -> None:
    runner = FakeRunner()
    engine = layered_engine(runner)
    prompts = {"a": [1, 2, 3], "b": LONG, "c": [9] * 100}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=20))
    result = run(engine)
    for name, prompt in prompts.items():
        assert tokens(result[name]) == continuation(prompt, 20), name
    found = groups(runner.plans)
    assert found, "no prompt was read in groups of layers"
    for passed in found.values():
        following = 0
        for count, layers in passed:
            assert layers.first == following, passed
            assert count > 24 or layers == LayerRange(0, LAYERS, LAYERS)
            following = 0 if layers.is_last else layers.end
        assert following == 0, "the last tokens have passed the last layer"


def test_one_prompt_is_parked_at_a_time_and_named_in_each_plan() -> None:
    runner = FakeRunner()
    engine = layered_engine(runner)
    for name in "abc":
        engine.add(request(name, [ord(name), *LONG], max_tokens=4))
    run(engine)
    parked: set[int] = set()
    for plan in runner.plans:
        assert set(plan.parked) == parked
        assert sum(piece.layers is not None for piece in plan.slices) <= 1
        for piece in plan.slices:
            if piece.layers is not None:
                parked = set() if piece.layers.is_last else {piece.sequence_id}
    assert len(groups(runner.plans)) > 1


def until_parked(engine: Engine) -> Sequence:
    """Steps until a prompt is parked."""
    while True:
        engine.step()
        for sequence in engine._scheduler.running:
            if sequence.num_parked_tokens:
                return sequence


def test_computed_tokens_and_shared_pages_move_behind_the_last_layer() -> None:
    runner = FakeRunner()
    engine = layered_engine(runner)
    engine.add(request("a", LONG, max_tokens=3))
    sequence = until_parked(engine)
    engine.add(request("b", [*LONG, 7], max_tokens=3))
    while sequence.num_parked_tokens:
        assert sequence.num_computed_tokens == 0
        assert sequence.num_shared_pages == 0
        assert not sequence.is_proven, "its pages have values that no token has proven"
        engine.step()
        assert engine.num_waiting == 1, "it waits for the pages of the parked prompt"
    assert sequence.num_computed_tokens > 24
    result = run(engine)
    assert tokens(result["b"]) == continuation([*LONG, 7], 3)
    assert result["b"][0].num_cached_tokens >= 96


@pytest.mark.faults
def test_a_step_is_not_sent_ahead_while_a_prompt_is_parked() -> None:
    engine = layered_engine(FakeRunner())
    engine.add(request("a", [1], max_tokens=60))
    engine.add(request("b", LONG, max_tokens=60))
    until_parked(engine)
    engine.begin_step()
    assert not engine.begin_ahead()
    engine.end_step(RuntimeError("this step is given up"))
    while engine._scheduler.layered.is_busy:
        engine.step()
    engine.begin_step()
    assert engine.begin_ahead(), "all prompts are read"


@pytest.mark.faults
@pytest.mark.parametrize("failing", range(4))
def test_a_failed_group_fails_no_request(failing: int) -> None:
    """Each sequence of a failed step runs alone, and the prompt passes all layers at once."""
    runner = FakeRunner()
    engine = layered_engine(runner)
    prompts = {"a": [1, 2], "b": LONG}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=12))
    found: dict[str, list[int]] = {}
    number = 0
    while engine.has_work:
        runner.fails_next = number == failing
        for delta in engine.step():
            assert delta.error is None
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check_integrity()
        number += 1
    for name, prompt in prompts.items():
        assert found[name] == continuation(prompt, 12), name


@pytest.mark.faults
def test_a_prompt_that_breaks_its_steps_fails_alone() -> None:
    runner = FakeRunner()
    runner.fails_on_token = 49
    engine = layered_engine(runner)
    engine.add(request("good", [1, 2], max_tokens=12))
    engine.add(request("bad", [*LONG, 49], max_tokens=12))
    result = run(engine)
    assert tokens(result["good"]) == continuation([1, 2], 12)
    assert result["bad"][-1].finish_reason is FinishReason.ERROR
    assert "poison" in str(result["bad"][-1].error)


def test_an_aborted_prompt_frees_its_state_and_pages() -> None:
    runner = FakeRunner()
    engine = layered_engine(runner)
    engine.add(request("other", [1], max_tokens=30))
    engine.add(request("long", LONG, max_tokens=30))
    until_parked(engine)
    engine.abort("long")
    engine.step()
    assert runner.plans[-1].parked == ()
    engine.check_integrity()
    assert not engine._scheduler.layered.is_busy
    run(engine)


def test_a_parked_prompt_that_is_preempted_starts_again_from_its_first_layer() -> None:
    runner = FakeRunner()
    engine = layered_engine(runner, num_pages=11)
    engine.add(request("first", [1] * 20, max_tokens=100))
    while engine.stats().load.num_free_pages > 9:
        engine.step()
    engine.add(request("long", LONG, max_tokens=20))
    sequence = until_parked(engine)
    engine._scheduler._preempt(sequence, {})
    assert (sequence.num_parked_tokens, sequence.num_parked_layers) == (0, 0)
    result = run(engine)
    assert tokens(result["long"]) == continuation(LONG, 20)
    starts = [layers.first for _, layers in groups(runner.plans)[sequence.id]]
    assert starts.count(0) > 1


def test_parked_bytes_bound_the_tokens_that_are_parked() -> None:
    """Two states of 4 bytes for each token."""
    runner = FakeRunner()
    engine = layered_engine(runner, parked_bytes=8 * 50)
    engine.add(request("long", LONG, max_tokens=5))
    assert tokens(run(engine)["long"]) == continuation(LONG, 5)
    counts = [count for passed in groups(runner.plans).values() for count, _ in passed]
    assert counts and max(counts) <= 50


def test_log_probabilities_of_a_prompt_are_computed_in_chunks() -> None:
    runner = FakeRunner()
    engine = layered_engine(runner)
    wanted = request("long", LONG, max_tokens=5)
    rules = replace(DecodingRules.of(wanted.params), prompt_logprobs=0)
    engine.add(replace(wanted, resolved=rules))
    run(engine)
    assert groups(runner.plans) == {}


def sequence_of(num_tokens: int) -> Sequence:
    sequence = Sequence(1, request("r", [1] * num_tokens))
    sequence.is_running = True
    return sequence


def test_a_parked_prompt_lets_others_pass_and_goes_on_when_its_turn_has_come() -> None:
    """With a small rest of the budget, it waits until the rests add up to one of its layers."""
    layered = LayeredPrefill(COSTS, "on", 1 << 20, 4)
    sequence = sequence_of(1000)
    share = layered.share(sequence, 128, {})
    assert share.layers is not None and share.layers.first == 0
    layered.take(sequence, share)
    assert layered.parks(sequence, share.count)
    assert layered.parked == (1,)
    waits = 0
    while True:
        layered.begin()
        rest = layered.share(sequence, 16, {})
        if rest.count:
            break
        waits += 1
    assert waits >= 1
    assert rest.layers == LayerRange(share.layers.end, share.layers.end + 1, LAYERS)
    assert rest.cost == 16


@settings(max_examples=60, deadline=None)
@given(
    pending=st.integers(2, 5000),
    budget=st.integers(1, 600),
    num_rows=st.integers(0, 64),
    top_k=st.sampled_from([1, 4, 8]),
    num_layers=st.integers(2, 48),
    read_rows=st.sampled_from([0.5, 6.5, 250.0]),
)
def test_a_group_costs_what_the_chunk_would_cost(
    pending: int, budget: int, num_rows: int, top_k: int, num_layers: int, read_rows: float
) -> None:
    costs = LayeredCosts(
        num_layers=num_layers,
        num_experts=64,
        top_k=top_k,
        read_rows=read_rows,
        dense_rows=1.0,
    )
    layered, sequence = LayeredPrefill(costs, "on", 1 << 30, 4), sequence_of(pending)
    running = {9: (sequence_of(1), num_rows)} if num_rows else {}
    for count in (pending, 1 + pending // 2, min(pending, budget)):
        offer = costs.layered(pending, count, budget, num_rows)
        is_possible = costs.num_allowed(count, budget, num_rows) > 0
        assert not is_possible or costs.least(pending, budget, num_rows) <= 1.001 * offer
    following, num_steps = 0, 0
    while sequence.num_pending_tokens > budget and num_steps < 3 * num_layers:
        layered.begin()
        share = layered.share(sequence, budget, running)
        assert 0 < share.count <= pending
        assert 0 < share.cost <= budget
        layered.take(sequence, share)
        if share.layers is None:
            assert share.count == share.cost == budget
            break
        passed = share.layers.end - share.layers.first
        chunk = num_layers * costs.more(num_rows, budget)
        assert passed * costs.more(num_rows, share.count) <= 1.001 * chunk
        assert share.layers.first == following
        following, num_steps = share.layers.end, num_steps + 1
        if not layered.parks(sequence, share.count):
            sequence.num_computed_tokens += share.count
            following = 0


@pytest.mark.parametrize(
    ("num_rows", "budget", "is_layered"),
    [(0, 128, True), (8, 128, True), (64, 128, False), (8, 1024, False)],
)
def test_auto_reads_in_layers_only_if_that_saves_enough(
    num_rows: int, budget: int, is_layered: bool
) -> None:
    layered = LayeredPrefill(COSTS, "auto", 1 << 30, 4)
    running = {9: (sequence_of(1), num_rows)}
    share = layered.share(sequence_of(1900), budget, running)
    assert (share.layers is not None) == is_layered


@pytest.mark.parametrize("is_mtp", [False, True])
def test_it_says_why_it_is_off(is_mtp: bool, caplog: pytest.LogCaptureFixture) -> None:
    speculation = SpeculationConfig(method="mtp" if is_mtp else "off")
    config = EngineConfig(speculation=speculation)
    spec = ServedCheckpoint.read(ModelConfig()).spec
    if not is_mtp:
        spec = replace(spec, layers=tuple(replace(e, is_sparse=False) for e in spec.layers))
    with caplog.at_level(logging.INFO):
        layered = LayeredPrefill.of(config, spec, "cpu", "float32")
    assert layered.share(sequence_of(1900), 64, {}).layers is None
    assert "scheduler.layered_prefill is off: " in caplog.text
