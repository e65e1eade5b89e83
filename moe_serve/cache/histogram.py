"""Counts how often values fell between bounds. One thread writes, and any thread may read."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts by range: `counts[i]` values were above bounds[i - 1] and at most bounds[i].

    The last entry counts the values above all bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0  # sum of the values

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds=bounds, counts=(0,) * (len(bounds) + 1))

    def __add__(self, other: Histogram) -> Histogram:
        assert self.bounds == other.bounds, f"bounds {self.bounds} and {other.bounds} differ"
        pairs = zip(self.counts, other.counts, strict=True)
        counts = tuple(own + its for own, its in pairs)
        return Histogram(bounds=self.bounds, counts=counts, total=self.total + other.total)


class HistogramCounter:
    """Counts on one thread; any thread may call `snapshot`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def count(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Histogram:
        return Histogram(bounds=self._bounds, counts=tuple(self._counts), total=self._total)
