"""Policies in real engines: each gives the same tokens, and signatures reach the policy."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_serve.config.sections import BatchPolicyName, PipelineConfig, SchedulerConfig
from moe_serve.engine.build import build_engine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.routes.route_records import RouteRecord
from moe_serve.engine.schedule.policy.concave_cost import ConcaveCost
from moe_serve.engine.schedule.policy.expected_experts import ExpectedExperts
from moe_serve.engine.schedule.policy.live_signatures import FollowedPredictor, LiveSignatures
from moe_serve.engine.schedule.policy.signature_table import SignatureTable
from routing_predictor.layers.recall_guard import GuardLimits, RecallGuard
from tests.support.cluster.layouts import colocated, config, on_ranks, requests, serve
from tests.support.engine.batch_world import decode

VOCAB_SIZE = 300  # of the tiny model
NUM_LAYERS, NUM_EXPERTS = 2, 8


@pytest.mark.parametrize("policy", ["fifo", "balanced", "expert-aware"])
def test_one_process_gives_the_same_tokens(policy: BatchPolicyName, tiny: str) -> None:
    wanted, of = requests(7, VOCAB_SIZE), config(0, 0, 1, folder=Path(tiny))
    expected = colocated(of, wanted)
    for micro_batches in (1, 2, 3, 4):
        scheduler = replace(of.scheduler, batch_policy=policy, max_num_seqs=5, max_passed_over=2)
        cut = replace(of, scheduler=scheduler, pipeline=PipelineConfig(micro_batches=micro_batches))
        engine = build_engine(cut).engine
        assert serve(engine, wanted) == expected, f"{policy}, {micro_batches} micro-batches"


@pytest.mark.parametrize(("capacity", "is_told"), [(1, True), (3, False)])
def test_rows_up_to_a_capacity(capacity: int, is_told: bool, tiny: str) -> None:
    """The tokens stay the same; the policy then does not count activated experts."""
    wanted, of = requests(5, VOCAB_SIZE), config(0, 0, 2, folder=Path(tiny))
    scheduler = replace(of.scheduler, batch_policy="expert-aware", expert_capacity=capacity)
    engine = build_engine(replace(of, scheduler=scheduler)).engine
    assert serve(engine, wanted) == colocated(of, wanted)
    batching = engine.stats().batching
    assert batching is not None and batching.policy == "expert-aware"
    assert (batching.activated_experts is not None) == is_told


@pytest.mark.sampled
@pytest.mark.parametrize(("attention", "micro_batches"), [(1, 2), (2, 3)])
@pytest.mark.parametrize("policy", ["balanced", "expert-aware"])
def test_ranks_give_the_same_tokens(
    policy: BatchPolicyName, attention: int, micro_batches: int, tiny: str
) -> None:
    wanted = requests(7, VOCAB_SIZE)
    of = config(attention, 1, micro_batches, folder=Path(tiny))
    aware = replace(of, scheduler=replace(of.scheduler, batch_policy=policy))
    assert on_ranks(aware, wanted) == colocated(of, wanted)


def test_a_step_ahead_keeps_the_split(tiny: str) -> None:
    """A step planned ahead has the same split as the step before it."""
    of = config(0, 0, 2, folder=Path(tiny))
    engine = build_engine(
        replace(of, scheduler=SchedulerConfig(max_num_seqs=8, batch_policy="expert-aware"))
    ).engine
    for request in requests(8, VOCAB_SIZE, num_tokens=60):
        engine.add(request)
    for _ in range(12):
        engine.step()
    plan = engine.begin_step(2)  # type: ignore[attr-defined]
    assert engine.begin_ahead()  # type: ignore[attr-defined]
    ahead = engine.make_plan_ahead(2)  # type: ignore[attr-defined]
    assert [[s.sequence_id for s in b.slices] for b in ahead.micro_batches] == [
        [s.sequence_id for s in b.slices] for b in plan.micro_batches
    ]


class Constant:
    """A predictor that always returns the same experts."""

    horizon = 32

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def predict(self, prefixes: Items[NDArray[np.int64]]) -> NDArray[np.float32]:
        self.sizes.append(len(prefixes))
        made = np.full((len(prefixes), NUM_LAYERS, NUM_EXPERTS), 0.1, dtype=np.float32)
        made[:, :, :2] = 0.7
        return made


def sequence_of(key: int, num_tokens: int = 20) -> Sequence:
    return Sequence(
        key,
        GenerationRequest(
            request_id=f"r{key}", prompt_token_ids=(1,) * num_tokens, params=SamplingParams()
        ),
    )


def record_of(key: int, experts: tuple[int, int], start: int = 20, count: int = 1) -> RouteRecord:
    return RouteRecord(
        request_id=f"r{key}",
        sequence_id=key,
        start=start,
        num_prompt_tokens=20,
        token_ids_N=np.ones(count, dtype=np.int32),
        expert_ids_NLK=np.array([[experts] * NUM_LAYERS] * count, dtype=np.uint8),
    )


def live(
    followed: FollowedPredictor | None, num_engines: int = 1
) -> tuple[LiveSignatures, SignatureTable]:
    table = SignatureTable(ConcaveCost())
    return LiveSignatures(table, NUM_EXPERTS, followed, 4, num_engines), table


def test_history_is_known_once_a_prompt_is_read() -> None:
    source, table = live(None)
    running = [sequence_of(0), sequence_of(1)]
    source.refresh([], running)
    assert len(table) == 0
    source.take([record_of(0, (2, 3), 0, 20)])
    source.refresh([], running)
    signature = table.signature(0)
    assert signature is not None and 1 not in table
    assert sorted(np.argsort(-signature.reshape(NUM_LAYERS, NUM_EXPERTS)[1])[:2]) == [2, 3]
    source.forget([0])
    assert 0 not in table


def test_a_predictor_knows_who_waits_and_is_asked_again_later() -> None:
    predictor = Constant()
    followed = FollowedPredictor(
        predictor=predictor, guard=RecallGuard(GuardLimits(min_recall=0.3)), is_acting=True
    )
    source, table = live(followed)
    waiting, running = [sequence_of(0)], [sequence_of(1)]
    for _ in range(3):
        source.refresh(waiting, running)
    assert 0 in table and 1 in table
    assert sum(predictor.sizes) == 2
    for _ in range(4):
        running[0].append(5)
    source.refresh(waiting, running)
    assert sum(predictor.sizes) == 3


@pytest.mark.parametrize(("num_engines", "num_first"), [(1, 4), (2, 2), (8, 1)])
def test_engines_share_the_time(num_engines: int, num_first: int) -> None:
    """Each engine refreshes in every step, and all together have one millisecond."""
    predictor = Constant()
    followed = FollowedPredictor(
        predictor=predictor, guard=RecallGuard(GuardLimits(min_recall=0.3)), is_acting=True
    )
    source, _ = live(followed, num_engines)
    source.refresh([sequence_of(key) for key in range(20)], [])
    assert predictor.sizes == [num_first]


def test_what_a_predictor_has_read_is_not_counted_for_it() -> None:
    """A prompt is read in two chunks, after a prediction that saw all of it."""
    guard = RecallGuard(GuardLimits(min_recall=0.3))
    followed = FollowedPredictor(predictor=Constant(), guard=guard, is_acting=True)
    source, _ = live(followed)
    source.refresh([sequence_of(0)], [])
    source.take([record_of(0, (0, 1), 0, 10)])
    source.take([record_of(0, (0, 1), 10, 10)])
    assert source.recall is None
    source.take([record_of(0, (4, 5), 20, 1)])
    assert source.recall == 0.0


def test_what_a_step_needs_follows_from_its_sequences() -> None:
    """The expectation is 1 - prod (1 - p), where each token is like a coming one. A sequence
    without a signature counts as the average of the others."""
    table = SignatureTable(ConcaveCost())
    known_RLE = np.zeros((2, NUM_LAYERS, NUM_EXPERTS), dtype=np.float32)
    known_RLE[0, 1, 3], known_RLE[1, 1, 3], known_RLE[1, 0, 5] = 0.5, 0.2, 1.0
    is_on = True
    expected = ExpectedExperts(table, NUM_EXPERTS, lambda: is_on)
    assert expected.of(decode([0, 1])) is None, "nothing is known"
    table.put([0, 1], known_RLE)
    needed_LE = expected.of([*decode([0]), *decode([1], num_tokens=2)])
    assert needed_LE is not None and needed_LE.shape == (NUM_LAYERS, NUM_EXPERTS)
    assert needed_LE[1, 3] == pytest.approx(1 - 0.5 * 0.8 * 0.8)
    assert needed_LE[0, 5] == pytest.approx(1.0, abs=1e-5) and needed_LE.sum() < 1.7
    other_LE = expected.of(decode([0, 7]))
    assert other_LE is not None and other_LE[1, 3] == pytest.approx(1 - 0.5 * 0.5)
    assert expected.of(decode([7])) is None, "nobody in the step is known"
    rng = np.random.default_rng(0)
    for count in (3, 90):  # newer signatures, and more of them than the table had room for
        signatures_RLE = rng.random((count, NUM_LAYERS, NUM_EXPERTS), dtype=np.float32) * 0.3
        table.put(list(range(count)), signatures_RLE)
        grown_LE = expected.of(decode(range(count)))
        assert grown_LE == pytest.approx(1 - np.prod(1 - signatures_RLE, axis=0), abs=1e-5)
    is_on = False
    assert expected.of(decode([0])) is None, "the guard has switched the predictor off"


def test_a_predictor_that_is_wrong_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    limits = GuardLimits(min_recall=0.5, min_measured=10)
    followed = FollowedPredictor(predictor=Constant(), guard=RecallGuard(limits), is_acting=True)
    source, _ = live(followed)
    source.refresh([], [sequence_of(0)])
    source.take([record_of(0, (0, 1), count=10)])
    assert source.is_on and source.recall == 1.0
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            source.take([record_of(0, (4, 5), count=10)])
    assert not source.is_on
    assert "switched off" in caplog.text
