"""Compares predictions with real choices, on documents never trained on: scores with intervals.

Scores are plain functions of arrays, one figure per sample and layer. "The top k" always breaks
ties by the lower id. Documents are independent, tokens are not; so intervals come from documents
drawn again. S samples (prefixes of requests, or tokens), L layers, E experts, K choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
_NUM_BINS = 10

RANKS = (2, 4, 8)
_BATCH = 16  # samples whose loads are added up
NUM_RESAMPLES = 1000


def top_experts(score_E: NDArray[Any], count: int) -> NDArray[np.int64]:
    """[..., E] -> [..., count]: the experts with the highest scores, ties by the lower id."""
    top: NDArray[np.int64] = np.argsort(-score_E.astype(np.float64), axis=-1, kind="stable")
    return top[..., :count]


def is_among(experts: NDArray[np.integer], num_experts: int) -> NDArray[np.bool_]:
    """[..., K] ids -> [..., E]."""
    among = np.zeros((*experts.shape[:-1], num_experts), dtype=np.bool_)
    np.put_along_axis(among, experts.astype(np.int64), True, axis=-1)
    return among


def overlap(score_SLE: Floats, count_SLE: NDArray[Any], top_k: int) -> Floats:
    """Returns [S, L]: the k experts predicted most against the k used most, common ones / k."""
    num_experts = score_SLE.shape[-1]
    predicted = is_among(top_experts(score_SLE, top_k), num_experts)
    used = is_among(top_experts(count_SLE, top_k), num_experts)
    common: Floats = (predicted & used).sum(-1) / top_k
    return common


def wider_recall(score_SLE: Floats, count_SLE: NDArray[Any], top_k: int) -> Floats:
    """Returns [S, L]: the share of the k experts used most that are among the 2k predicted most."""
    num_experts = score_SLE.shape[-1]
    predicted = is_among(top_experts(score_SLE, 2 * top_k), num_experts)
    used = is_among(top_experts(count_SLE, top_k), num_experts)
    found: Floats = (predicted & used).sum(-1) / top_k
    return found


def token_overlap(score_SLE: Floats, count_SLE: NDArray[Any], top_k: int) -> Floats:
    """Returns [S, L]: the share of the choices that fell on the k experts predicted most. This is
    the mean over the counted tokens of (their choices among these) / k."""
    predicted = is_among(top_experts(score_SLE, top_k), score_SLE.shape[-1])
    return share(np.where(predicted, count_SLE, 0).sum(-1), count_SLE.sum(-1))


def captured(score_SLE: Floats, count_SLE: NDArray[Any], top_k: int) -> Floats:
    """Returns [S, L]: choices on the k experts predicted most, over those on the k used most; at
    most 1."""
    predicted = is_among(top_experts(score_SLE, top_k), score_SLE.shape[-1])
    best = np.sort(count_SLE, axis=-1)[..., -top_k:].sum(-1)
    return share(np.where(predicted, count_SLE, 0).sum(-1), best)


METRICS: Mapping[str, Callable[[Floats, NDArray[np.integer], int], Floats]] = {
    "overlap": overlap,
    "recall at 2k": wider_recall,
    "token overlap": token_overlap,
    "captured": captured,
}


def share(part: NDArray[Any], whole: NDArray[Any]) -> Floats:
    """part / whole, 0 if whole is 0."""
    divided: Floats = np.divide(
        part, whole, out=np.zeros(np.broadcast(part, whole).shape), where=whole > 0
    )
    return divided


@dataclass(frozen=True, slots=True)
class CalibrationCurve:
    """Predicted probabilities and observed frequencies, in bins of equal width."""

    predicted: tuple[float, ...]  # mean of each bin that is not empty
    observed: tuple[float, ...]
    num_cases: tuple[int, ...]

    @property
    def error(self) -> float:
        """The expected calibration error: mean |predicted - observed|, weighted by cases."""
        gaps = np.abs(np.array(self.predicted) - np.array(self.observed))
        return float(np.average(gaps, weights=self.num_cases)) if self.num_cases else 0.0


def calibration(
    probability: Floats, frequency: Floats, num_bins: int = _NUM_BINS
) -> CalibrationCurve:
    """Compares probabilities with `frequency`, how often the event happened (same shape; a share,
    or 0 and 1)."""
    flat, happened = probability.ravel().astype(np.float64), frequency.ravel().astype(np.float64)
    place = np.minimum((flat * num_bins).astype(np.int64), num_bins - 1)
    cases = np.bincount(place, minlength=num_bins)
    kept = np.flatnonzero(cases)
    sums = (np.bincount(place, weights=values, minlength=num_bins) for values in (flat, happened))
    predicted, observed = (total[kept] / cases[kept] for total in sums)
    return CalibrationCurve(tuple(predicted.tolist()), tuple(observed.tolist()), tuple(cases[kept]))


def rank_load_error(
    predicted_SLE: Floats, used_SLE: NDArray[Any], num_ranks: int, batch: int
) -> Floats:
    """Returns [B, L]: for batches of consecutive samples, the predicted load of each rank against
    the true one: mean |difference| over the mean load of a rank.

    Experts are on ranks in contiguous blocks. Both loads are scaled to the same total. Worked
    example, 2 ranks: predicted (3, 1), true (2, 2): mean |difference| 1, mean load 2: 0.5.
    """
    num_batches = len(predicted_SLE) // batch
    loads = []
    for counts_SLE in (predicted_SLE, used_SLE):
        whole = counts_SLE[: num_batches * batch].astype(np.float64)
        batches_BLE = whole.reshape(num_batches, batch, *whole.shape[1:]).sum(1)
        blocks = np.array_split(batches_BLE, num_ranks, axis=-1)
        ranks_BLR = np.stack([block.sum(-1) for block in blocks], -1)
        loads.append(share(ranks_BLR, ranks_BLR.mean(-1, keepdims=True)))
    error: Floats = np.abs(loads[0] - loads[1]).mean(-1)
    return error


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
    """Computes an interval; every document counts the same, however many samples it has."""
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
    """Judges scores. `score_SLE` orders experts; with `is_probability` it is the probability that a
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
    """Computes an interval by resampling batches, because batches mix documents."""
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
