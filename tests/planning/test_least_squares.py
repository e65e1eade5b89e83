"""Fits: exact where the data are, never negative, and errors that are relative."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.planning.measure import fit


@given(coefficients=st.lists(st.floats(0.01, 10), min_size=3, max_size=3))
def test_finds_a_linear_law(coefficients: list[float]) -> None:
    x = np.array([1.0, 2, 4, 8, 16, 32])
    columns = np.column_stack([np.ones(6), x, np.sqrt(x)])
    found = fit(columns, columns @ coefficients)
    assert found.coefficients == pytest.approx(coefficients, rel=1e-3, abs=1e-6)
    assert found.r_squared == pytest.approx(1.0)
    assert found.max_error < 1e-6


def test_no_coefficient_is_negative() -> None:
    """The exact line through these has a negative slope."""
    found = fit(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([2.0, 1.0]))
    assert min(found.coefficients) == 0.0
    assert found.coefficients[0] > 0


def test_small_measurements_count_as_much_as_large_ones() -> None:
    columns = np.array([[1.0], [1000.0]])
    found = fit(columns, np.array([1.0, 2000.0]))
    assert abs(found.errors[0]) == pytest.approx(abs(found.errors[1]), rel=0.5)
    assert found.median_error <= found.max_error
