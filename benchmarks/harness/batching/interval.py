"""Means with intervals over draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and where it lies in 95 of 100 resamplings of the draws."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        rng, array = np.random.default_rng(0), np.array(values)
        picks = rng.integers(len(array), size=(_NUM_RESAMPLES, len(array)))
        low, high = np.percentile(array[picks].mean(axis=1), [2.5, 97.5])
        return Interval(float(array.mean()), float(low), float(high))

    def percent_below_one(self) -> str:
        """A ratio as what it saves: "12.1% [11.0, 13.2]"."""
        low, high = 100 * (1 - self.high), 100 * (1 - self.low)
        return f"{100 * (1 - self.mean):.1f}% [{low:.1f}, {high:.1f}]"
