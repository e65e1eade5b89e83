"""Compares predictions with real choices, on documents never trained on: figures with intervals.

Documents are independent, tokens are not; so intervals come from documents drawn again.
S samples (prefixes of requests, or tokens), L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing_predictor.judge.scores import (
    CalibrationCurve,
    calibration,
    captured,
    overlap,
    rank_load_error,
    token_overlap,
    wider_recall,
)

Floats = NDArray[np.floating]

RANKS = (2, 4, 8)
_BATCH = 16  # samples whose loads are added up
METRICS: Mapping[str, Callable[[Floats, NDArray[np.integer], int], Floats]] = {
    "overlap": overlap,
    "recall at 2k": wider_recall,
    "token overlap": token_overlap,
    "captured": captured,
}
NUM_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over documents, and the middle 95% of the means of resampled documents."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f}% [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def document_means(
    value_S: NDArray[np.floating], document_S: NDArray[np.integer]
) -> NDArray[np.float64]:
    """[documents]: the mean of each document's samples."""
    _, place_S = np.unique(document_S, return_inverse=True)
    sums = np.bincount(place_S, weights=value_S)
    means: NDArray[np.float64] = sums / np.bincount(place_S)
    return means


def interval(
    value_S: NDArray[np.floating], document_S: NDArray[np.integer], seed: int = 0
) -> Interval:
    """Compute an interval; every document counts the same, however many samples it has."""
    means = document_means(value_S, document_S)
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(means), (NUM_RESAMPLES, len(means)))
    resampled = means[draws].mean(1)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(float(means.mean()), float(low), float(high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The real choices after each sample, counted over `num_tokens` tokens."""

    count_SLE: NDArray[np.integer]
    num_tokens: int
    top_k: int
    document_S: NDArray[np.integer]
    label_S: tuple[str, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One metric: over all layers, of each layer, and over all layers by label."""

    overall: Interval
    of_layer: Mapping[int, Interval]
    of_label: Mapping[str, Interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorVerdict:
    """All figures reported for one predictor."""

    name: str
    scores: Mapping[str, Score]
    calibration: CalibrationCurve | None  # None if its scores are not probabilities
    calibration_of_layer: Mapping[int, float]
    rank_load_error: Mapping[int, Interval]  # by number of ranks

    def as_json(self) -> dict[str, Any]:
        def pair(value: Interval) -> list[float]:
            return [round(each, 5) for each in (value.mean, value.low, value.high)]

        document: dict[str, Any] = {
            metric: {
                "overall": pair(score.overall),
                "layers": {str(layer): pair(each) for layer, each in score.of_layer.items()},
                "labels": {label: pair(each) for label, each in score.of_label.items()},
            }
            for metric, score in self.scores.items()
        }
        document["rank load error"] = {
            str(ranks): pair(each) for ranks, each in self.rank_load_error.items()
        }
        if self.calibration is not None:
            document["calibration"] = {
                "error": round(self.calibration.error, 5),
                "layers": {str(k): round(v, 5) for k, v in self.calibration_of_layer.items()},
                "predicted": [round(each, 5) for each in self.calibration.predicted],
                "observed": [round(each, 5) for each in self.calibration.observed],
                "cases": [int(each) for each in self.calibration.num_cases],
            }
        return document


def judge(
    name: str, score_SLE: Floats, truth: Truth, *, is_probability: bool = True
) -> PredictorVerdict:
    """Judge scores. `score_SLE` orders experts; with `is_probability` it is the probability that a
    token chooses each."""
    used_SLE, top_k = truth.count_SLE, truth.top_k
    frequency_SLE = used_SLE / truth.num_tokens
    order = np.random.default_rng(0).permutation(len(used_SLE))  # batches of mixed documents
    layers = range(len(truth.layers))
    return PredictorVerdict(
        name=name,
        scores={
            metric: _score(of_sample(score_SLE, used_SLE, top_k), truth)
            for metric, of_sample in METRICS.items()
        },
        calibration=calibration(score_SLE, frequency_SLE) if is_probability else None,
        calibration_of_layer={
            truth.layers[i]: calibration(score_SLE[:, i], frequency_SLE[:, i]).error
            for i in (layers if is_probability else ())
        },
        rank_load_error={
            ranks: _of_batches(
                rank_load_error(score_SLE[order], used_SLE[order], ranks, _batch(len(order)))
            )
            for ranks in RANKS
            if ranks <= used_SLE.shape[-1]
        },
    )


def _batch(num_samples: int) -> int:
    return min(_BATCH, num_samples)


def _of_batches(error_BL: Floats) -> Interval:
    """Compute an interval by resampling batches, because batches mix documents."""
    return interval(error_BL.mean(1), np.arange(len(error_BL)))


def _score(value_SL: Floats, truth: Truth) -> Score:
    whole_S, labels = value_SL.mean(1), np.array(truth.label_S)
    return Score(
        overall=interval(whole_S, truth.document_S),
        of_layer={
            layer: interval(value_SL[:, index], truth.document_S)
            for index, layer in enumerate(truth.layers)
        },
        of_label={
            label: interval(whole_S[labels == label], truth.document_S[labels == label])
            for label in sorted(set(truth.label_S) - {""})
        },
    )
