"""Tests if a series of samples is flat: its slope by least squares, with an interval.

Neighbouring samples are alike (memory comes in steps), which makes the usual interval far too
narrow: it is widened by what the residuals' correlation with their neighbours leaves of their
number, n (1 - r) / (1 + r).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student_t


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Per hour, with a 95% interval."""

    slope: float
    low: float
    high: float

    def is_flat(self, limit: float) -> bool:
        """Surely below `limit`: an interval that reaches it says too little."""
        return self.high <= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleRule:
    """The warm-up ends when memory has grown by at most `most_mib` in the last `num_visits` visits,
    and after `most_share` of the run in any case: a leak never settles, and is judged then."""

    num_visits: int = 1000
    most_mib: float = 2.0
    most_share: float = 0.5

    def first_settled(
        self, seconds: Sequence[float], visits: Sequence[int], mib: Sequence[float]
    ) -> tuple[int, bool]:
        """-> the first sample after the warm-up, and whether memory had settled by then."""
        for now in range(len(visits)):
            if seconds[now] >= self.most_share * seconds[-1]:
                return now, False
            earlier = bisect_right(visits, visits[now] - self.num_visits) - 1
            if earlier >= 0 and mib[now] - mib[earlier] <= self.most_mib:
                return now, True
        return len(visits), False


def trend_of(seconds: Sequence[float], values: Sequence[float]) -> Trend:
    """At least four samples."""
    x, y = np.asarray(seconds) / 3600.0, np.asarray(values, dtype=float)
    assert len(x) >= 4, f"{len(x)} samples have no trend"
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    rest = y - y.mean() - slope * (x - x.mean())
    variance = float((rest**2).sum())
    if variance == 0.0:
        return Trend(slope=slope, low=slope, high=slope)
    alike = float((rest[1:] * rest[:-1]).sum()) / variance
    count = max(4.0, len(x) * (1 - max(0.0, alike)) / (1 + max(0.0, alike)))
    error = math.sqrt(variance / (len(x) - 2) / (spread * count / len(x)))
    half = float(student_t.ppf(0.975, count - 2)) * error
    return Trend(slope=slope, low=slope - half, high=slope + half)
