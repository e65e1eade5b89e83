"""The closed formula against the discrete simulation, and against numbers on paper."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.pipeline.costs.step_seconds import LayerTimes, simulate_layers, step_seconds


def equal_times(a: float, e: float, c: float, m: int, num_layers: int) -> LayerTimes:
    return LayerTimes(
        num_layers=num_layers, attention_s=(a,) * m, experts_s=(e,) * m, transfer_s=(c,) * m
    )


@pytest.mark.parametrize(
    ("m", "c", "expected"),
    [
        (1, 0.0, 20.0),  # L (T_a + T_e): nothing overlaps
        (2, 0.0, 21.0),  # twice the work in one more stage: the ping-pong's factor of two
        (1, 0.5, 30.0),
        (2, 0.5, 31.0),  # m < 2 (1 + T_c / T_f) = 3: a layer takes the round trip of 3
        (3, 0.5, 32.0),  # full: (T_a + T_e + 2 T_c) + T_f (m L - 1)
    ],
)
def test_by_hand(m: int, c: float, expected: float) -> None:
    """T_a = T_e = 1, ten layers."""
    times = equal_times(1.0, 1.0, c, m, 10)
    assert step_seconds([times]) == pytest.approx(expected)
    assert simulate_layers([times]) == pytest.approx(expected)


@given(
    a=st.floats(0.1, 10),
    e=st.floats(0.1, 10),
    c=st.floats(0, 10),
    m=st.integers(1, 4),
    num_layers=st.integers(1, 40),
    pools=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_equal_micro_batches_are_exact(
    a: float, e: float, c: float, m: int, num_layers: int, pools: tuple[int, int]
) -> None:
    times = equal_times(a, e, c, m, num_layers)
    assert step_seconds([times]) == pytest.approx(simulate_layers([times], *pools), rel=1e-6)


def unequal(low: float, high: float, transfer: float) -> st.SearchStrategy[list[Any]]:
    stage = st.floats(low, high)
    return st.lists(st.tuples(stage, stage, st.floats(0, transfer)), min_size=1, max_size=4)


@given(parts=unequal(0.8, 1.25, 1.0), num_layers=st.integers(4, 40))
def test_nearly_equal_micro_batches_are_within_15_percent(
    parts: list[tuple[float, float, float]], num_layers: int
) -> None:
    """The batcher makes micro-batches this similar."""
    a, e, c = (tuple(column) for column in zip(*parts, strict=True))
    times = LayerTimes(num_layers=num_layers, attention_s=a, experts_s=e, transfer_s=c)
    assert step_seconds([times]) == pytest.approx(simulate_layers([times]), rel=0.15)


@given(parts=unequal(0.5, 2.0, 2.0), num_layers=st.integers(4, 40))
def test_unequal_micro_batches_are_within_25_percent(
    parts: list[tuple[float, float, float]], num_layers: int
) -> None:
    a, e, c = (tuple(column) for column in zip(*parts, strict=True))
    times = LayerTimes(num_layers=num_layers, attention_s=a, experts_s=e, transfer_s=c)
    assert step_seconds([times]) == pytest.approx(simulate_layers([times]), rel=0.25)


def test_dense_layers_stay_on_the_attention_ranks() -> None:
    dense = equal_times(1.0, 0.0, 0.0, 2, 3)
    assert step_seconds([dense]) == pytest.approx(6.0)
    assert simulate_layers([dense]) == pytest.approx(6.0)
