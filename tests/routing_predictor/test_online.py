"""The guard that switches a predictor off and on, and online learning."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from numpy.typing import NDArray

from routing_predictor.layers.recall_guard import GuardLimits, RecallGuard
from routing_predictor.requests.online import OnlineLimits, OnlinePredictor

LIMITS = GuardLimits(min_recall=0.5, hysteresis=0.1, window=10, min_measured=5)


def test_the_guard_switches_off_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    guard = RecallGuard(LIMITS, "the predictor")
    assert guard.is_on and guard.recall is None
    with caplog.at_level(logging.WARNING):
        guard.measure(0.9, 10)
        guard.measure(0.0, 4)
        assert guard.is_on, "0.9 * 0.9^4 is 0.59"
        guard.measure(0.0, 5)
    assert not guard.is_on
    assert "the predictor is switched off: its recall is 34.9%, below 50.0%" in caplog.text
    for _ in range(8):
        guard.measure(0.58, 5)
    assert not guard.is_on, "above the floor, but not by enough"
    for _ in range(3):
        guard.measure(0.9, 5)
    assert guard.is_on and guard.num_switches == 2


def test_the_guard_waits_for_enough_measurements() -> None:
    guard = RecallGuard(LIMITS)
    guard.measure(0.0, 4)
    assert guard.is_on
    guard.measure(0.0, 0)
    assert guard.is_on
    guard.measure(0.0)
    assert not guard.is_on


class _Constant:
    """Predicts the same for every token."""

    horizon = 4

    def __init__(self, probability_LE: NDArray[np.float32]) -> None:
        self._probability_LE = probability_LE

    def predict(self, prefixes: object) -> NDArray[np.float32]:
        assert isinstance(prefixes, list)
        return np.repeat(self._probability_LE[None], len(prefixes), 0)


def test_it_follows_a_workload_that_has_moved() -> None:
    inner = _Constant(np.array([[0.9, 0.9, 0.1, 0.1]], dtype=np.float32))
    online = OnlinePredictor(inner, 2, OnlineLimits())
    prefixes = [np.array([1])] * 16
    np.testing.assert_array_equal(online.predict(prefixes), inner.predict(prefixes))
    count = np.tile(np.array([[[0, 0, 4, 4]]]), (16, 1, 1))  # only what is not predicted
    for _ in range(30):
        online.observe(online.predict(prefixes), count)
    learnt = online.predict(prefixes)[0, 0]
    assert (learnt[2:] > 0.5).all() and (learnt[:2] < 0.5).all()
    np.testing.assert_allclose(learnt.sum(), 2.0, atol=1e-5)
    assert online.num_observed == 30 * 16


def test_what_it_learns_is_bounded_and_needs_choices() -> None:
    inner = _Constant(np.array([[0.9, 0.9, 0.1, 0.1]], dtype=np.float32))
    online = OnlinePredictor(inner, 2, OnlineLimits(max_shift=0.5))
    nothing = np.zeros((3, 1, 4), dtype=np.int64)
    online.observe(inner.predict([0] * 3), nothing)
    assert online.num_observed == 0
    count = np.tile(np.array([[[0, 0, 4, 4]]]), (16, 1, 1))
    for _ in range(200):
        online.observe(online.predict([0] * 16), count)
    odds = online.predict([0])[0, 0]
    np.testing.assert_allclose(odds[2] / odds[0], (0.1 / 0.9) * np.exp(1.0), rtol=1e-4)
