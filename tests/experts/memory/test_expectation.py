"""The expected next use of experts: by hand, by distance, and by learnt transitions."""

from __future__ import annotations

import numpy as np
import pytest

from experts.memory.expectation import Expectation, Transitions


def test_what_is_sure_comes_by_its_distance() -> None:
    """Three layers form a circle. After a visit of layer 1, layer 2 is next, then 0, then 1."""
    expectation = Expectation(3, 4)
    for layer in [0, 1, 2] * 99 + [0, 1]:
        expectation.visit(layer, np.ones(4, dtype=bool))
    assert expectation.distances().tolist() == [2, 3, 1]
    assert np.allclose(expectation.visits_until()[:, 0], [2, 3, 1], atol=1e-3)


def test_half_a_chance_is_a_round_later() -> None:
    """Without history an expert is used in 1 of 2 visits: d + L (1 - p) / p = 1 + 2 visits. One
    that was not used for many visits is far away."""
    expectation = Expectation(2, 2)
    assert expectation.visits_until()[0].tolist() == [3, 3]
    for layer in [0, 1] * 99:
        expectation.visit(layer, np.array([True, False]))
    assert expectation.visits_until()[0, 1] > 1000


def test_a_hint_counts_half_until_nobody_knows() -> None:
    expectation = Expectation(2, 2)
    for layer in [0, 1] * 99:
        expectation.visit(layer, np.array([True, False]))
    history = expectation.probability.copy()
    expectation.hint(np.array([[0.0, 0.8], [1.0, 1.0]]))
    assert expectation.probability == pytest.approx(np.array([[0.5, 0.4], [1.0, 0.5]]), abs=1e-3)
    expectation.visit(0, np.array([True, False]))
    assert expectation.probability[0] == pytest.approx([0.5, 0.4], abs=1e-3), "it is held"
    expectation.hint(None)
    assert expectation.probability == pytest.approx(history, abs=1e-3)


def test_history_forgets() -> None:
    expectation = Expectation(1, 2)
    for needed in 30 * [[True, False]] + 30 * [[False, True]]:
        expectation.visit(0, np.array(needed))
    first, second = expectation.probability[0]
    assert first == pytest.approx(0.05, abs=0.02) and second == pytest.approx(0.95, abs=0.02)


def test_a_prediction_that_comes_too_late_is_dropped() -> None:
    expectation = Expectation(3, 2)
    expectation.visit(0, np.array([True, False]))
    expectation.visit(1, np.array([True, False]))
    before = expectation.probability.copy()
    expectation.predict(0, np.array([0.9, 0.9]))
    assert np.array_equal(expectation.probability, before), "layer 1 has been visited already"
    expectation.predict(1, np.array([0.9, 0.8]))
    assert expectation.probability[2].tolist() == [0.9, 0.8]


def test_what_is_foreseen_counts_until_its_rows_come() -> None:
    """Two micro-batches in layer 0 need something of layer 1: both together, then the second
    one."""
    expectation = Expectation(3, 2)
    for layer in [0, 1, 2] * 99:
        expectation.visit(layer, np.array([True, False]))
    history = expectation.probability.copy()
    for micro_batch, needed in enumerate([[0.5, 0.6], [0.0, 0.5]]):
        assert expectation.foresee(0, micro_batch, np.array(needed)) is None, "nobody said before"
        expectation.visit(0, np.array([True, False]))
    assert expectation.probability[1] == pytest.approx([0.5, 0.8])
    came = expectation.foresee(1, 0, np.array([0.1, 0.2]))
    assert came is not None and came.tolist() == [0.5, 0.6]
    assert expectation.probability[1] == pytest.approx([0.5, 0.8]), "until its visit"
    expectation.visit(1, np.array([True, False]))
    assert expectation.probability[1].tolist() == [0.0, 0.5], "of the second"
    assert expectation.probability[2] == pytest.approx([0.1, 0.2])
    expectation.foresee(1, 1, None)
    expectation.visit(1, np.array([True, False]))
    assert expectation.probability[1] == pytest.approx(history[1], abs=1e-3)
    expectation.hint(None)  # the next step; this one failed on its way
    assert expectation.probability == pytest.approx(history, abs=1e-3)
    assert expectation.foresee(2, 0, np.array([1.0, 1.0])) is None
    assert expectation.probability[0] == pytest.approx(history[0], abs=1e-3), "another step's"


def test_who_is_not_needed_now_comes_as_often_as_ever() -> None:
    """Layer 1 of 2 is next. A popular expert that is not foreseen comes a round later. A rare one
    that is foreseen comes at once, or with half the probability a round later."""
    expectation = Expectation(2, 3)
    for layer in [0, 1] * 99 + [0]:
        expectation.visit(layer, np.array([True, False, False]))
    expectation.foresee(0, 0, np.array([0.0, 1.0, 0.5]))
    assert expectation.visits_until()[1] == pytest.approx([3, 1, 3], abs=0.01)


def test_transitions_are_learnt() -> None:
    """Rows that chose e in layer 0 choose e + 1 in layer 1; the last layer teaches nothing."""
    rng = np.random.default_rng(0)
    transitions = Transitions(2, 8)
    assert transitions.visit(0, np.array([[1, 4]])) is None, "nothing is known"
    for _ in range(100):
        ids_TK = np.sort([rng.choice(7, 2, replace=False) for _ in range(8)])
        transitions.visit(0, ids_TK)
        assert transitions.visit(1, ids_TK + 1) is None, "the last layer's next is another step's"
    expected_E = transitions.visit(0, np.array([[1, 4]]))
    assert expected_E is not None and set(np.argsort(-expected_E)[:2].tolist()) == {2, 5}
    assert expected_E[[2, 5]].min() > 0.5 > np.delete(expected_E, [2, 5]).max(), expected_E
    both_E = transitions.visit(0, np.array([[1, 4], [2, 6]]))
    assert both_E is not None and both_E[[2, 3, 5, 7]].min() > 0.5


def test_rows_that_do_not_match_teach_nothing() -> None:
    transitions = Transitions(2, 4)
    for _ in range(300):
        transitions.visit(0, np.array([[0, 1]]))
        transitions.visit(1, np.array([[0, 1], [2, 3]]))
    assert transitions.visit(0, np.array([[0, 1]])) is None
