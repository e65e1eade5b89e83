"""A histogram for Prometheus of what is observed for every token.

The library's own takes two locks and a walk over the buckets each time, which is a share of the
work for a token; this one is written on one thread, and made into a family when it is asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenGaps(Collector):
    """`bounds`: the upper ends of the buckets, rising; there is one more without an end."""

    def __init__(self, name: str, text: str, model_name: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._model_name = name, text, model_name
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int) -> None:
        """So many times the same."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([self._model_name], buckets, self._sum)
        yield family
