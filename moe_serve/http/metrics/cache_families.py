"""The metrics of the KV cache: its shape, what prompts found in it, and how long pages stay."""

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
    """What the configuration and the model say of the cache."""

    has_prefix_cache: bool = True
    dtype: str = "auto"  # of its values


NO_CACHE_FACTS = CacheFacts()


def cache_families(
    stats: EngineStats, facts: CacheFacts, prefix: str, model_name: str
) -> Iterator[Metric]:
    # The names and values of the labels are vLLM's, as gateways that route by free pages read them.
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
        "1; the labels say how many tokens a KV page has, how many pages there are and how "
        "many tokens those hold, whether prompts share them, and what their values are.",
        labels=list(labels),
    )
    info.add_metric(list(labels.values()), 1.0)
    yield info
    sources = CounterMetricFamily(
        prefix + "prompt_tokens_by_source",
        "Prompt tokens of sequences that started, once for each: found in the prefix cache "
        "(local_cache_hit), or not (local_compute).",
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
            "From when a sampled page was handed out until the prefix cache evicted it.",
            times.lifetime,
        ),
        "kv_block_idle_before_evict_seconds": (
            "Until a sampled page was evicted, since a sequence last found it, or it was handed "
            "out.",
            times.idle,
        ),
        "kv_block_reuse_gap_seconds": (
            "Between two sequences that found the same sampled page.",
            times.reuse_gap,
        ),
    }
