"""A predictor that goes on learning while it serves: its examples, its cost, and its guard."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import moe_serve
from moe_serve.config.sections import CacheConfig, PredictorConfig, PredictorMode
from moe_serve.engine.build import build_engine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.routes.route_records import RouteRecord
from moe_serve.engine.schedule.policy.concave_cost import ConcaveCost
from moe_serve.engine.schedule.policy.live_learning import LiveLearning
from moe_serve.engine.schedule.policy.live_signatures import FollowedPredictor, LiveSignatures
from moe_serve.engine.schedule.policy.signature_table import SignatureTable
from routing_predictor.layers.recall_guard import GuardLimits, RecallGuard
from routing_predictor.requests.online import OnlineLimits, OnlinePredictor
from tests.support.cluster.layouts import colocated, config, requests, serve
from tests.support.http.full_metrics import metrics_text

DEMO = Path(moe_serve.__file__).parent / "demo_model" / "predictor"
NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 8, 2


class Constant:
    """Always returns the experts 0 and 1."""

    horizon = 32

    def predict(self, prefixes: Items[NDArray[np.int64]]) -> NDArray[np.float32]:
        made = np.full((len(prefixes), NUM_LAYERS, NUM_EXPERTS), 0.1, dtype=np.float32)
        made[:, :, :2] = 0.7
        return made


class Observer(OnlinePredictor):
    """Keeps the examples that it is given."""

    def __init__(self) -> None:
        super().__init__(Constant(), TOP_K, OnlineLimits())
        self.seen: list[tuple[NDArray[np.float32], NDArray[np.integer]]] = []

    def observe(self, predicted_RLE: NDArray[np.float32], count_RLE: NDArray[np.integer]) -> None:
        self.seen.append((predicted_RLE, count_RLE))
        super().observe(predicted_RLE, count_RLE)


def ids(count: int, experts: tuple[int, int]) -> NDArray[np.uint8]:
    return np.array([[experts] * NUM_LAYERS] * count, dtype=np.uint8)


def said(value: float) -> NDArray[np.float32]:
    return np.full((NUM_LAYERS, NUM_EXPERTS), value, dtype=np.float32)


def test_a_prediction_is_compared_with_what_came_after_it() -> None:
    predictor = Observer()
    learning = LiveLearning(predictor)
    learning.chose(7, ids(9, (0, 1)))  # nothing was predicted of it
    learning.predicted(7, said(0.1))
    learning.chose(7, ids(3, (2, 3)))
    learning.predicted(7, said(0.2))  # too early
    learning.chose(7, ids(2, (2, 4)))
    learning.predicted(7, said(0.3))
    learning.chose(7, ids(3, (5, 6)))
    learning.end([7, 8])  # the second one saw too little
    learning.learn()
    learning.learn()
    ((predicted_RLE, count_RLE),) = predictor.seen
    np.testing.assert_array_equal(predicted_RLE, said(0.1)[None])
    assert count_RLE[0].tolist() == [[0, 0, 5, 3, 2, 0, 0, 0]] * NUM_LAYERS
    assert learning.num_learnt == 1


def test_what_it_costs_is_bounded() -> None:
    """Three bounds: the tokens of a comparison, the waiting comparisons, and one example per
    step."""
    predictor = Observer()
    learning = LiveLearning(predictor)
    for key in range(100):
        learning.predicted(key, said(0.1))
        for _ in range(200):
            learning.chose(key, ids(1, (0, 1)))
        learning.end([key])
    for _ in range(100):
        learning.learn()
    assert learning.num_learnt == 64, "the oldest are lost"
    assert {len(predicted_RLE) for predicted_RLE, _ in predictor.seen} == {1}
    assert {int(count_RLE[0, 0].sum()) for _, count_RLE in predictor.seen} == {64 * TOP_K}


def record_of(key: int, experts: tuple[int, int], start: int) -> RouteRecord:
    return RouteRecord(
        request_id=f"r{key}",
        sequence_id=key,
        start=start,
        num_prompt_tokens=20,
        token_ids_N=np.ones(8, dtype=np.int32),
        expert_ids_NLK=ids(8, experts),
    )


def test_the_guard_judges_what_it_has_learnt(caplog: pytest.LogCaptureFixture) -> None:
    """Requests choose the experts 4 and 5: the predictor is off at first, and on once it has learnt
    them."""
    online = OnlinePredictor(Constant(), TOP_K, OnlineLimits())
    guard = RecallGuard(GuardLimits(min_recall=0.5, window=100, min_measured=50))
    followed = FollowedPredictor(
        predictor=online, guard=guard, is_acting=True, learning=LiveLearning(online)
    )
    source = LiveSignatures(SignatureTable(ConcaveCost()), NUM_EXPERTS, followed, refresh_tokens=8)
    states = []
    with caplog.at_level(logging.WARNING):
        for key in range(300):
            request = GenerationRequest(
                request_id=f"r{key}", prompt_token_ids=(1,) * 20, params=SamplingParams()
            )
            source.refresh([Sequence(key, request)], [])
            source.take([record_of(key, (4, 5), 20)])
            source.forget([key])
            states.append(source.is_on)
    assert states[0] and not states[20] and states[-1], "on, off, on"
    assert source.recall is not None and source.recall > 0.95 and source.num_learnt == 299
    assert "switched off" in caplog.text and "switched on" in caplog.text


@pytest.mark.parametrize("mode", ["act", "observe"])
def test_learning_changes_no_token(mode: PredictorMode) -> None:
    """With few pages, some requests are passed over and others are preempted."""
    wanted, of = requests(9, 4096, num_tokens=20), config(0, 0, 2)
    model = replace(of.model, max_model_len=128)
    of = replace(of, model=model, cache=CacheConfig(num_pages=12))
    predictor = PredictorConfig(path=str(DEMO), mode=mode, learn=True, refresh_tokens=8)
    scheduler = replace(of.scheduler, batch_policy="expert-aware")
    engine = build_engine(replace(of, scheduler=scheduler, predictor=predictor)).engine
    assert serve(engine, wanted) == colocated(of, wanted)
    batching = engine.stats().batching
    assert batching is not None and batching.num_learnt is not None
    assert batching.num_learnt >= 4 and batching.recall is not None, f"{batching}"
    line = f'moe_serve:predictor_learnt_total{{model_name="m"}} {float(batching.num_learnt)}'
    assert line in metrics_text(engine.stats())
