"""Percentiles of durations in the last minute, in bounded memory.

The durations of each second are counted in buckets that grow by 5%, so a percentile is accurate to
2.5%.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW_S = 60
_GROWTH = math.log(1.05)
_LEAST_S = 1e-6

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles in milliseconds."""

    p50: float
    p90: float
    p99: float
    count: int


class RecentTimes:
    """Counts durations. Any thread may add and read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: deque[tuple[int, Counter[int]]] = deque()

    def add(self, seconds: float, count: int = 1) -> None:
        """Adds `count` equal durations."""
        self.add_all(np.full(count, seconds), int(self._clock()))

    def add_all(self, times: Array, second: int) -> None:
        """Adds durations that were observed in this second of the clock. Seconds never decrease."""
        buckets, counts = np.unique(
            np.rint(np.log(np.maximum(times, _LEAST_S)) / _GROWTH), return_counts=True
        )
        with self._lock:
            if not self._seconds or self._seconds[-1][0] != second:
                self._seconds.append((second, Counter()))
                while self._seconds[0][0] <= second - WINDOW_S:
                    self._seconds.popleft()
            self._seconds[-1][1].update(dict(zip(map(int, buckets), map(int, counts), strict=True)))

    def look(self, window_s: int = WINDOW_S) -> Percentiles | None:
        """Percentiles of the last `window_s` seconds; None: nothing was added."""
        oldest, total = int(self._clock()) - window_s, Counter[int]()
        with self._lock:
            for second, counts in self._seconds:
                if second > oldest:
                    total.update(counts)
        if not total:
            return None
        p50, p90, p99 = (_percentile(total, share) for share in (0.5, 0.9, 0.99))
        return Percentiles(p50=p50, p90=p90, p99=p99, count=total.total())


def _percentile(counts: Counter[int], share: float) -> float:
    left = math.ceil(share * counts.total())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return round(1000 * math.exp(bucket * _GROWTH), 3)
    raise AssertionError(f"no bucket has the share {share} of {counts.total()}")
