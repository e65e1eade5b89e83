"""Scores predictions of experts: plain functions of arrays, one figure per sample and layer.

S samples (prefixes or tokens), L layers, E experts, K choices. "The top k" always breaks ties by
the lower id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
_NUM_BINS = 10


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
    """[S, L]: the k experts predicted most against the k used most, common ones / k."""
    num_experts = score_SLE.shape[-1]
    predicted = is_among(top_experts(score_SLE, top_k), num_experts)
    used = is_among(top_experts(count_SLE, top_k), num_experts)
    common: Floats = (predicted & used).sum(-1) / top_k
    return common


def wider_recall(score_SLE: Floats, count_SLE: NDArray[Any], top_k: int) -> Floats:
    """[S, L]: the share of the k experts used most that are among the 2k predicted most."""
    num_experts = score_SLE.shape[-1]
    predicted = is_among(top_experts(score_SLE, 2 * top_k), num_experts)
    used = is_among(top_experts(count_SLE, top_k), num_experts)
    found: Floats = (predicted & used).sum(-1) / top_k
    return found


def token_overlap(score_SLE: Floats, count_SLE: NDArray[Any], top_k: int) -> Floats:
    """[S, L]: the share of the choices that fell on the k experts predicted most. This is the mean
    over the counted tokens of (their choices among these) / k."""
    predicted = is_among(top_experts(score_SLE, top_k), score_SLE.shape[-1])
    return share(np.where(predicted, count_SLE, 0).sum(-1), count_SLE.sum(-1))


def captured(score_SLE: Floats, count_SLE: NDArray[Any], top_k: int) -> Floats:
    """[S, L]: choices on the k experts predicted most, over those on the k used most; at most 1."""
    predicted = is_among(top_experts(score_SLE, top_k), score_SLE.shape[-1])
    best = np.sort(count_SLE, axis=-1)[..., -top_k:].sum(-1)
    return share(np.where(predicted, count_SLE, 0).sum(-1), best)


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
    """Compare probabilities with `frequency`, how often the event happened (same shape; a share, or
    0 and 1)."""
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
    """[B, L]: for batches of consecutive samples, the predicted load of each rank against the true
    one: mean |difference| over the mean load of a rank.

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
