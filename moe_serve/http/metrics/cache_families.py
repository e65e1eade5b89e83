"""Metrics of the KV cache: its shape, prefix cache hits, and the lifetime of pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from moe_serve.cache.histogram import Histogram
from moe_serve.cache.page_times import PageTimes
from moe_serve.config.sections import PAGE_SIZE
from moe_serve.engine.request.client import EngineStats
from moe_serve.http.metrics.cumulative import cumulative


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """Properties of the KV cache that come from the configuration and the model."""

    has_prefix_cache: bool = True
    dtype: str = "auto"  # of its values


NO_CACHE_FACTS = CacheFacts()


def cache_families(
    stats: EngineStats, facts: CacheFacts, prefix: str, model_name: str
) -> Iterator[Metric]:
    # The labels have vLLM's names and values, because gateways that route by free pages read them.
    labels = {
        "model_name": model_name,
        "block_size": str(PAGE_SIZE),
        "num_gpu_blocks": str(stats.num_pages),
        "kv_cache_size_tokens": str(stats.num_pages * PAGE_SIZE),
        "enable_prefix_caching": str(facts.has_prefix_cache),
        "cache_dtype": facts.dtype,
    }
    info = GaugeMetricFamily(
        prefix + "cache_config_info",
        "1; the labels give the tokens per KV page, the number of pages and of tokens they "
        "hold, whether the prefix cache is on, and the data type.",
        labels=list(labels),
    )
    info.add_metric(list(labels.values()), 1.0)
    yield info
    sources = CounterMetricFamily(
        prefix + "prompt_tokens_by_source",
        "Prompt tokens of started sequences, each counted once: found in the prefix cache "
        "(local_cache_hit) or computed (local_compute).",
        labels=["model_name", "source"],
    )
    sources.add_metric([model_name, "local_compute"], stats.num_missed_tokens)
    sources.add_metric([model_name, "local_cache_hit"], stats.num_hit_tokens)
    yield sources
    for name, (text, histogram) in _page_times(stats.page_times).items():
        family = HistogramMetricFamily(prefix + name, text, labels=["model_name"])
        buckets = cumulative(histogram.bounds, histogram.counts)
        family.add_metric([model_name], buckets, histogram.total)
        yield family


def _page_times(times: PageTimes) -> dict[str, tuple[str, Histogram]]:
    return {
        "kv_block_lifetime_seconds": (
            "Time from the allocation of a sampled page until the prefix cache evicted it.",
            times.lifetime,
        ),
        "kv_block_idle_before_evict_seconds": (
            "Time from the last use or allocation of a sampled page until its eviction.",
            times.idle,
        ),
        "kv_block_reuse_gap_seconds": (
            "Time between two sequences that found the same sampled page.",
            times.reuse_gap,
        ),
    }
