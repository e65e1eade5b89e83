"""Metrics of the recorded routing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moe_serve.engine.tracing import TracingStatus


def trace_families(status: TracingStatus, prefix: str, model_name: str) -> Iterator[Metric]:
    total = status.total
    gauge = GaugeMetricFamily(
        f"{prefix}trace_recording", "Whether the routing is recorded now.", labels=["model_name"]
    )
    gauge.add_metric([model_name], float(status.is_recording))
    yield gauge
    counters: Mapping[str, tuple[str, int]] = {
        "trace_tokens": ("Tokens whose routing was recorded.", total.num_tokens),
        "trace_bytes": ("Bytes of recordings that were written.", total.num_written_bytes),
        "trace_dropped_parts": (
            "Files of recordings that were deleted to stay below trace.max_bytes.",
            total.num_dropped_parts,
        ),
        "trace_lost_tokens": (
            "Recorded tokens that could not be written to disk.",
            total.num_lost_tokens,
        ),
    }
    for name, (text, value) in counters.items():
        counter = CounterMetricFamily(prefix + name, text, labels=["model_name"])
        counter.add_metric([model_name], value)
        yield counter
