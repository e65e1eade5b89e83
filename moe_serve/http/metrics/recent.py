"""The outcomes and token times of recent requests.

`RecentTimes` gives percentiles of durations in the last minute, in bounded memory. The durations of
each second are counted in buckets that grow by 5%, so a percentile is accurate to 2.5%.

`TokenGaps` is the time between two tokens: a histogram for Prometheus, and such percentiles. There
is one value per token, so observing only stores it. Stored values are counted together when the
metric is read, a second has passed, or _MOST have been stored: this costs a hundredth per token.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.histogram import Histogram
from moe_serve.engine.request.request import FinishReason

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
        """Returns the percentiles of the last `window_s` seconds; None if nothing was added."""
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


_MOST = 2048
_GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class TokenGaps:
    """Observed on one thread, read on any."""

    def __init__(
        self, bounds: Sequence[float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`bounds`: upper ends of the histogram's buckets, increasing. The last bucket has no
        end."""
        self._bounds, self._clock = np.array(bounds), clock
        self._kept: deque[float] = deque()
        # end of the second in which all stored values were observed
        self._second_ends = float("-inf")
        self._lock = threading.Lock()  # guards the fields below
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0
        self._recent = RecentTimes(clock)

    def observe(self, seconds: float, count: int, now: float) -> None:
        """Adds `count` equal times. `now`: of the clock."""
        if now >= self._second_ends or len(self._kept) >= _MOST:
            self._count(now)
        if count == 1:
            self._kept.append(seconds)
        else:
            self._kept.extend([seconds] * count)

    def look(self, window_s: int = WINDOW_S) -> Percentiles | None:
        """See `RecentTimes.look`."""
        self._count()
        return self._recent.look(window_s)

    def snapshot(self) -> Histogram:
        self._count()
        with self._lock:
            counts, total = self._counts.tolist(), self._sum
        return Histogram(bounds=tuple(self._bounds.tolist()), counts=tuple(counts), total=total)

    def _count(self, now: float | None = None) -> None:
        """Counts the stored values. With `now`, later values belong to another second."""
        with self._lock:
            second = self._second_ends - 1
            if now is not None:
                self._second_ends = int(now) + 1
            kept = np.array([self._kept.popleft() for _ in range(len(self._kept))])
            if len(kept):
                places = np.searchsorted(self._bounds, kept)
                self._counts += np.bincount(places, minlength=len(self._counts))
                self._sum += float(kept.sum())
                self._recent.add_all(kept, int(second))


class RecentRequests:
    """Written on the event loop's thread, read by any thread."""

    def __init__(self) -> None:
        self.num_finished = self.num_failed = self.num_rejected = 0
        self.num_windowed = self.num_dropped_tokens = 0  # see `ServerMetrics.count_window`
        self.first_tokens = RecentTimes()  # from a request to its first token
        self.next_tokens = TokenGaps(
            _GAP_BOUNDS
        )  # between two tokens of a sequence: each token counts

    def ended(self, reason: FinishReason) -> None:
        """Counts a finished sequence. One whose client disconnected is neither finished nor
        failed."""
        self.num_finished += reason in (FinishReason.STOP, FinishReason.LENGTH)
        self.num_failed += reason is FinishReason.ERROR
