"""Means over draws or rounds, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from routing_predictor.judge.evaluate import interval


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and the interval that contains 95 of 100 resamplings of the draws."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        """Builds the interval by resampling; draws are independent."""
        found = interval(np.array(values, dtype=np.float64), np.arange(len(values)))
        return Interval(found.mean, found.low, found.high)

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"

    def percent_below_one(self) -> str:
        """Formats a ratio as the share that it saves: "12.1% [11.0, 13.2]"."""
        low, high = 100 * (1 - self.high), 100 * (1 - self.low)
        return f"{100 * (1 - self.mean):.1f}% [{low:.1f}, {high:.1f}]"
