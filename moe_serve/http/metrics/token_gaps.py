"""The time between two tokens: a histogram for Prometheus, and percentiles of the last minute.

There is one value per token, so observing only stores it. Stored values are counted together when
the metric is read, a second has passed, or _MOST have been stored: this costs a hundredth per
token.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_serve.http.metrics.cumulative import cumulative
from moe_serve.http.metrics.recent_times import WINDOW_S, Percentiles, RecentTimes

_MOST = 2048


class TokenGaps(Collector):
    """Observed on one thread, read on any."""

    def __init__(
        self,
        name: str,
        text: str,
        model_name: str,
        bounds: Sequence[float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bounds`: upper ends of the histogram's buckets, increasing. The last bucket has no
        end."""
        self._name, self._text, self._model_name = name, text, model_name
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

    def collect(self) -> Iterator[Metric]:
        self._count()
        with self._lock:
            counts, total = self._counts.tolist(), self._sum
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        buckets = cumulative(self._bounds.tolist(), counts)
        family.add_metric([self._model_name], buckets, total)
        yield family

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
