"""Metrics of the engine's steps and of waiting sequences."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from moe_serve.engine.request.client import EngineStats
from moe_serve.engine.request.step_tokens import BOUNDS
from moe_serve.http.metrics.cumulative import cumulative
from moe_serve.http.metrics.waiting import waiting_by_reason


def step_families(stats: EngineStats, prefix: str, model_name: str) -> Iterator[Metric]:
    histogram = HistogramMetricFamily(
        prefix + "iteration_tokens_total",
        "Prompt tokens that a step computed, and tokens that it generated.",
        labels=["model_name"],
    )
    buckets = cumulative(BOUNDS, stats.step_tokens.num_steps)
    histogram.add_metric([model_name], buckets, float(stats.step_tokens.num_tokens))
    yield histogram
    waiting = GaugeMetricFamily(
        prefix + "num_requests_waiting_by_reason",
        "Waiting sequences by reason: capacity (no seat or KV page was free) or deferred "
        "(skipped at the last look, for a prefix being computed or a later sequence).",
        labels=["model_name", "reason"],
    )
    for reason, count in waiting_by_reason(stats).items():
        waiting.add_metric([model_name, reason], count)
    yield waiting
