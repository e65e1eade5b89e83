"""Renders the page of /metrics: one collector that reads the table of metrics.

With the alias `vllm`, metrics that vLLM has too appear a second time under its names, for
dashboards and rules that were made for vLLM:

    moe_serve:num_requests_running{model_name="m"}  is also
    vllm:num_requests_running{model_name="m",engine="0"}
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from moe_serve.cache.histogram import Histogram
from moe_serve.config.sections import MetricsAlias
from moe_serve.http.metrics.metrics import ServerMetrics
from moe_serve.http.metrics.scrape import (
    MODEL_LABEL,
    PREFIX,
    MetricRow,
    Scrape,
    Scraper,
    ScrapeSources,
    Value,
)
from moe_serve.http.metrics.table import METRICS

ALIAS_PREFIX = "vllm:"
ENGINE_LABEL = {"engine": "0"}  # clients see all attention ranks as one engine


class MetricsPage(Collector):
    """The metrics of one server, in the order of the table."""

    def __init__(
        self, metrics: ServerMetrics, sources: ScrapeSources, alias: MetricsAlias = "none"
    ) -> None:
        self._metrics, self._alias = metrics, alias
        self._scraper = Scraper(sources, metrics.recent.next_tokens)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        scrape = self._scraper.scrape()
        for row in METRICS:
            for metric in self._read(row, scrape):
                yield metric
                if row.is_vllm and self._alias == "vllm":
                    yield _vllm_copy(metric)

    def _read(self, row: MetricRow, scrape: Scrape) -> Iterable[Metric]:
        if row.get is None:
            return self._metrics.collect(row.name)
        value = row.get(scrape)
        return () if value is None else [_family(row, value, self._metrics.model_name)]


def _family(row: MetricRow, value: Value, model_name: str) -> Metric:
    name = PREFIX + row.name
    if isinstance(value, Histogram):
        histogram = HistogramMetricFamily(name, row.help, labels=[MODEL_LABEL])
        histogram.add_metric([model_name], cumulative(value.bounds, value.counts), value.total)
        return histogram
    make = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    family = make(name, row.help, labels=[MODEL_LABEL, *row.labels])
    samples = value if isinstance(value, Mapping) else {(): value}
    for labels, sample in samples.items():
        if sample is not None:
            family.add_metric([model_name, *labels], sample)
    return family


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """For bounds (1, 8) and counts (3, 2, 4): [("1.0", 3.0), ("8.0", 5.0), ("+Inf", 9.0)]."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, itertools.accumulate(counts)), strict=True))


def _vllm_copy(metric: Metric) -> Metric:
    copy = Metric(
        ALIAS_PREFIX + metric.name.removeprefix(PREFIX), metric.documentation, metric.type
    )
    copy.samples = [
        sample._replace(
            name=ALIAS_PREFIX + sample.name.removeprefix(PREFIX),
            labels={**sample.labels, **ENGINE_LABEL},
        )
        for sample in metric.samples
    ]
    return copy
