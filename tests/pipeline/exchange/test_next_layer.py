"""Foreseen experts of the next layer: bytes by hand, and a guard that switches them off and on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_serve.pipeline.exchange.next_layer import NextLayer, together
from routing_predictor.layers.recall_guard import GuardLimits, RecallGuard
from routing_predictor.layers.router_residual import (
    RouterResidual,
    RouterWeights,
    choice_probability,
)
from routing_predictor.layers.train_layers import LayerPredictors

NUM_EXPERTS, LAYERS, STEPS = 6, (0, 2, 3), 16


def predictors() -> LayerPredictors:
    """Returns untrained predictors: a row's logits are its normed values, so the largest two are
    chosen."""
    return LayerPredictors(
        [
            RouterResidual(
                RouterWeights(
                    layer=layer,
                    norm_D=torch.ones(NUM_EXPERTS),
                    norm_eps=0.0,
                    weight_ED=torch.eye(NUM_EXPERTS),
                ),
                num_hidden=4,
            )
            for layer in LAYERS[1:]
        ]
    )


def next_layer(min_recall: float = 0.5) -> tuple[NextLayer, RecallGuard]:
    guard = RecallGuard(GuardLimits(min_recall=min_recall, window=4, min_measured=4))
    return NextLayer(predictors(), LAYERS, 2, guard), guard


def rows(*chosen: tuple[int, int]) -> Tensor:
    hidden_TD = torch.zeros(len(chosen), NUM_EXPERTS)
    for row, pair in enumerate(chosen):
        hidden_TD[row, list(pair)] = 3.0
    return hidden_TD


def step(of: NextLayer, hidden_TD: Tensor, chosen: list[list[int]]) -> list[Tensor | None]:
    """Runs all layers of one micro-batch, whose routers choose the same."""
    with torch.inference_mode():
        return [of.of(layer, 0, hidden_TD, torch.tensor(chosen)) for layer in LAYERS]


def test_probabilities_of_rows_together() -> None:
    hidden_TD = rows((0, 1), (1, 4))
    first, second, last = step(next_layer()[0], hidden_TD, [[0, 1], [1, 4]])
    assert first is not None and second is not None and last is None, "the last leads nowhere"
    assert first.dtype == torch.uint8 and torch.equal(first, second)
    normed_TE = predictors().layers["2"].router.normed(hidden_TD)
    p_TE = choice_probability(normed_TE, 2).double()
    expected_E = 255 * (1 - (1 - p_TE).prod(0))
    assert first.tolist() == pytest.approx(expected_E.tolist(), abs=0.51)
    assert first[[0, 1, 4]].min() > 250 > 10 > first[[2, 3, 5]].max(), f"{first}"


def test_of_many_rows_some_are_looked_at() -> None:
    """The sampled rows count for the others: 64 equal rows count as 64, not as 32."""
    hidden_TD = torch.tensor([[1.0, 0.9, 0.6, 0, 0, 0]])
    one, *_ = step(next_layer()[0], hidden_TD, [[0, 1]])
    many, *_ = step(next_layer()[0], hidden_TD.expand(64, -1), [[0, 1]] * 64)
    assert one is not None and many is not None
    spared = 1 - float(one[2]) / 255
    assert 0.05 < 1 - spared < 0.5, f"{one}"
    assert float(many[2]) / 255 == pytest.approx(1 - spared**64, abs=0.02)


def test_below_the_floor_it_is_silent_and_comes_back() -> None:
    of, guard = next_layer()
    hidden_TD, right, wrong = rows((0, 1)), [[0, 1]], [[4, 5]]
    for number in range(3 * STEPS):
        before = guard.is_on
        first, *_ = step(of, hidden_TD, wrong)
        assert (first is not None) == before, f"step {number}"
    assert not guard.is_on and guard.recall == 0.0
    for _ in range(8 * STEPS):
        first, *_ = step(of, hidden_TD, right)
    assert guard.is_on and first is not None and guard.num_switches == 2


def test_one_step_in_sixteen_is_measured() -> None:
    """Two layers are foreseen, so there are two measurements of one row each."""
    of, guard = next_layer()
    counts: list[int] = []
    guard.measure = lambda recall, count=1: counts.append(count)  # type: ignore[method-assign]
    for _ in range(2 * STEPS):
        step(of, rows((0, 1)), [[0, 1]])
    assert counts == [1] * 4


def test_a_step_that_failed_is_not_measured() -> None:
    of, guard = next_layer()
    with torch.inference_mode():
        of.of(0, 0, rows((0, 1)), torch.tensor([[4, 5]]))
        of.of(0, 0, rows((0, 1)), torch.tensor([[4, 5]]))
        of.of(3, 0, rows((0, 1)), torch.tensor([[4, 5]]))
    assert guard.recall is None


def test_several_ranks_rows() -> None:
    one, other = (torch.tensor(each, dtype=torch.uint8) for each in ([0, 51, 255], [0, 51, 3]))
    assert together([]) is None and together([one]) is one
    both = together([one, other])
    assert both is not None and both.tolist() == [0, 92, 255], "1 - 0.8 * 0.8 = 92 / 255"
