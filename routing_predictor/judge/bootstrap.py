"""Computes means over documents with confidence intervals; documents are independent, tokens are
not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
