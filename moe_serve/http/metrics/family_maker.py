"""Makes Prometheus metric families with the server's prefix and the label `model_name`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

PREFIX = "moe_serve:"
Values = Mapping[str, tuple[str, float | None]]  # end of the name -> help text, value
Samples = Mapping[tuple[str, ...], float | None]  # values of the labels -> value


class FamilyMaker:
    """Makes families with the prefix of the server's metrics and the label `model_name`."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def gauges(self, values: Values, prefix: str = "") -> Iterator[Metric]:
        for name, (text, value) in values.items():
            if value is not None:
                yield self.gauge(prefix + name, text, {(): value})

    def counters(self, values: Values, prefix: str = "") -> Iterator[Metric]:
        for name, (text, value) in values.items():
            if value is not None:
                yield self.counter(prefix + name, text, {(): value})

    def gauge(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        """A gauge with further `labels`; `samples` maps their values to the gauge's value."""
        return self._filled(
            GaugeMetricFamily(PREFIX + name, text, labels=["model_name", *labels]), samples
        )

    def counter(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        """A counter with further `labels`, like `gauge`."""
        return self._filled(
            CounterMetricFamily(PREFIX + name, text, labels=["model_name", *labels]), samples
        )

    def histogram(
        self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> Metric:
        """`counts` has one value more than `bounds`: the last bucket has no end."""
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], cumulative(bounds, counts), total)
        return family

    def _filled(
        self,
        family: GaugeMetricFamily | CounterMetricFamily,
        samples: Samples,
    ) -> Metric:
        for labels, value in samples.items():
            if value is not None:
                family.add_metric([self._model_name, *labels], value)
        return family


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """For bounds (1, 8) and counts (3, 2, 4): [("1.0", 3.0), ("8.0", 5.0), ("+Inf", 9.0)]."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, itertools.accumulate(counts)), strict=True))
