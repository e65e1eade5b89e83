"""Metrics against examples worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from routing_predictor.judge.evaluate import (
    Truth,
    calibration,
    captured,
    document_means,
    interval,
    judge,
    overlap,
    rank_load_error,
    token_overlap,
    top_experts,
    wider_recall,
)
from routing_predictor.judge.rivals import blended, logistic_regression, marginal

# One sample, one layer, four experts, k = 2. Predicted: 0 and 1. Used most: 1 and 2.
SCORE = np.array([[[0.9, 0.8, 0.1, 0.2]]])
COUNT = np.array([[[1, 4, 3, 0]]])


def test_ties_go_to_the_lower_id() -> None:
    assert top_experts(np.array([1.0, 3.0, 3.0, 3.0]), 2).tolist() == [1, 2]
    assert top_experts(np.array([0, 0, 0], dtype=np.uint8), 2).tolist() == [0, 1]


def test_metrics_of_one_sample() -> None:
    assert overlap(SCORE, COUNT, 2).tolist() == [[0.5]]  # expert 1 of {1, 2}
    assert wider_recall(SCORE, COUNT, 2).tolist() == [[1.0]]  # both are among all four
    assert token_overlap(SCORE, COUNT, 2).tolist() == [[5 / 8]]  # 1 + 4 of 8 choices
    assert captured(SCORE, COUNT, 2).tolist() == [[5 / 7]]  # the best two have 7


def test_calibration_by_hand() -> None:
    # [0, 0.5): 0.2 and 0.4 predicted, one of two happened. [0.5, 1]: 1.0 predicted, it happened.
    found = calibration(np.array([0.2, 0.4, 1.0]), np.array([0.0, 1.0, 1.0]), num_bins=2)
    assert found.num_cases == (2, 1)
    np.testing.assert_allclose(found.predicted, (0.3, 1.0))
    np.testing.assert_allclose(found.observed, (0.5, 1.0))
    assert found.error == pytest.approx(0.2 * 2 / 3)


def test_rank_loads_by_hand() -> None:
    # Two samples of one batch, two ranks. Predicted sums (3, 1 | 2, 2), scaled to the true total.
    predicted = np.array([[[1, 1, 1, 1]], [[2, 0, 1, 1]]], dtype=np.float64)
    used = np.array([[[3, 3, 1, 1]], [[0, 0, 0, 0]]])
    # Predicted shares of the ranks 4 : 4, true 6 : 2, mean load 4: errors 2 and 2 -> 0.5.
    assert rank_load_error(predicted, used, 2, 2).tolist() == [[0.5]]


def test_an_interval_is_of_documents_not_of_samples() -> None:
    value, document = np.array([1.0, 1.0, 1.0, 0.0]), np.array([7, 7, 7, 3])
    assert document_means(value, document).tolist() == [0.0, 1.0]
    found = interval(value, document)
    assert (found.mean, found.low, found.high) == (0.5, 0.0, 1.0)
    assert interval(value, document) == found, "resampling has a seed"


def test_judging_names_layers_and_labels() -> None:
    truth = Truth(
        count_SLE=np.repeat(COUNT, 2, axis=0),
        num_tokens=4,
        top_k=2,
        document_S=np.array([0, 1]),
        label_S=("law", "code"),
        layers=(5,),
    )
    verdict = judge("x", np.repeat(SCORE, 2, axis=0), truth)
    assert verdict.scores["overlap"].overall.mean == 0.5
    assert set(verdict.scores["overlap"].of_layer) == {5}
    assert set(verdict.scores["overlap"].of_label) == {"law", "code"}
    assert set(verdict.rank_load_error) == {2, 4}, "eight ranks want eight experts"
    document = verdict.as_json()
    assert document["overlap"]["overall"] == [0.5, 0.5, 0.5]
    assert sum(document["calibration"]["cases"]) == 8
    no_probability = judge("y", np.repeat(SCORE, 2, axis=0), truth, is_probability=False)
    assert "calibration" not in no_probability.as_json()


def test_baselines() -> None:
    count = np.array([[6, 2, 0, 0]])
    assert marginal(count, 3).shape == (3, 1, 4)
    assert marginal(count, 3)[2, 0].tolist() == [0.75, 0.25, 0.0, 0.0]
    # 64 choices of prior: 48, 16, 0, 0; history adds 64 of expert 3.
    blend = blended(np.array([[[0, 0, 0, 64]]]), count)
    assert blend[0, 0].tolist() == [0.375, 0.125, 0.0, 0.5]


def test_logistic_regression_finds_a_rule() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(300, 3))
    chosen = (features[:, 0] > 0).astype(int)
    count = np.zeros((300, 1, 4), dtype=np.int64)
    count[np.arange(300), 0, chosen] = 2  # experts 2 and 3 are never used
    told: list[tuple[str, float]] = []
    seen, unseen = features[:200], features[200:]
    scores = logistic_regression(
        seen, count[:200], unseen, progress=lambda *said: told.append(said)
    )
    assert told == [("logistic regression on 200 prefixes, layer 1 of 1", 0.0)]
    assert scores.shape == (100, 1, 4)
    leaning = scores[:, 0, 1] - scores[:, 0, 0]
    assert np.corrcoef(leaning, features[200:, 0])[0, 1] > 0.9
    assert (scores[:, 0, 2:] == 0).all()


def test_logistic_regression_where_all_choose_one_expert() -> None:
    features, count = np.arange(30.0).reshape(10, 3), np.zeros((10, 1, 4), dtype=np.int64)
    count[:, 0, 2] = 5
    scores = logistic_regression(features, count, features[:2])
    assert scores.tolist() == [[[0.0, 0.0, 1.0, 0.0]]] * 2
