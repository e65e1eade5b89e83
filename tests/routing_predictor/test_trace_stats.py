"""Figures of traces, against numbers worked out on paper."""

from __future__ import annotations

import numpy as np
import pytest

from routing_predictor.traces.trace import DECODE, RoutingTrace
from routing_predictor.traces.trace_stats import (
    activations,
    balancedness,
    drifts,
    layer_loads,
    total_variation,
    windows,
)
from tests.support.routing.traces import make_trace


def constant(choices: list[int], num_tokens: int = 8, num_requests: int = 2) -> RoutingTrace:
    """Makes a trace in which every token of a request chooses one expert; `choices` is by
    request."""
    request = np.repeat(np.arange(num_requests), num_tokens // num_requests)
    return RoutingTrace(
        expert_ids_NLK=np.array(choices, np.uint8)[request][:, None, None],
        request_N=request.astype(np.int32),
        position_N=np.tile(np.arange(num_tokens // num_requests), num_requests).astype(np.int32),
        phase_N=np.full(num_tokens, DECODE, np.uint8),
        num_experts=4,
        layers=(7,),
        request_ids=("a", "b"),
    )


def test_a_layer() -> None:
    (layer,) = layer_loads(np.array([[1, 0, 5, 2]]), [9], num_ranks=2, num_hottest=2)
    assert layer.layer == 9 and layer.num_choices == 8 and layer.num_unused == 1
    assert layer.hottest == (2, 3) and layer.shares == (5 / 8, 2 / 8)
    assert layer.hottest_over_mean == 5 / 2
    assert layer.balancedness == 4 / 7  # ranks have 1 and 7


def test_balancedness_of_nothing_is_even() -> None:
    assert balancedness(np.zeros(4, np.int64), 2) == 1.0


def test_drift_is_seen() -> None:
    """The first half goes to expert 1, the second to 3: windows are disjoint, each 0.5 from the
    whole."""
    first, second = drifts(windows(constant([1, 3]), 2))
    assert first.to_previous is None and second.to_previous == second.to_previous_worst == 1.0
    assert first.to_all == second.to_all == 0.5
    assert total_variation(np.array([[1, 3]]), np.array([[2, 2]])).tolist() == [0.25]


def test_activated_experts() -> None:
    """The tokens of one request touch one expert, those of two requests two."""
    by_size = {each.batch_size: each for each in activations(constant([1, 3]))}
    assert set(by_size) == {1, 2, 4, 8}
    assert by_size[2].one_per_request == 2.0 and by_size[2].one_request == 1.0
    assert by_size[4].one_per_request is None and by_size[4].one_request == 1.0
    assert by_size[8].one_request is None and by_size[8].any_tokens == 2.0
    assert by_size[2].even == pytest.approx(4 * (1 - 0.75**2))


def test_a_whole_trace() -> None:
    trace = make_trace(num_requests=40, num_tokens=8)
    for each in activations(trace):
        assert trace.top_k <= each.any_tokens <= trace.num_experts
        assert abs(each.any_tokens - each.even) < 0.25, "ids are drawn evenly"
    assert np.array_equal(windows(trace, 5).sum(axis=0), trace.load())
