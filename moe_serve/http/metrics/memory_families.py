"""Metrics of expert memory (experts loaded on demand), summed over all processes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from experts.memory.memory_stats import MemoryStats


def memory_families(stats: MemoryStats, prefix: str, model_name: str) -> Iterator[Metric]:
    gauges = {
        "budget_bytes": ("Memory for packed experts.", stats.budget_bytes),
        "resident_bytes": ("Packed experts in this memory.", stats.resident_bytes),
        "hit_rate": ("Share of needed experts that were in memory, 0 to 1.", stats.hit_rate),
    }
    counters = {
        "needed": ("Experts that layers needed.", stats.num_needed),
        "hits": ("Needed experts that were in memory when the rows came.", stats.num_hits),
        "late": ("Needed experts that were being read when the rows came.", stats.num_late),
        "rows": ("Choices of rows.", stats.num_rows),
        "row_hits": ("Choices of experts that were in memory.", stats.num_row_hits),
        "reads": ("Experts read.", stats.num_reads),
        "read_bytes": ("Bytes of the experts read, packed.", stats.bytes_read),
        "prefetches": ("Experts read before they were needed.", stats.num_prefetched),
        "prefetch_hits": (
            "Prefetched experts that were needed before they were evicted.",
            stats.num_prefetch_hits,
        ),
        "foretold": (
            "Experts that the next-layer predictor expected rows to need.",
            stats.num_foretold,
        ),
        "foreseen": ("Predicted experts that were needed.", stats.num_foreseen),
        "passes": ("Passes over a layer's rows.", stats.num_passes),
        "wait_seconds": ("Time that layers waited for experts.", stats.wait_seconds),
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"{prefix}expert_memory_{name}", text, labels=["model_name"])
        gauge.add_metric([model_name], value)
        yield gauge
    for name, (text, value) in counters.items():
        counter = CounterMetricFamily(f"{prefix}expert_memory_{name}", text, labels=["model_name"])
        counter.add_metric([model_name], value)
        yield counter
