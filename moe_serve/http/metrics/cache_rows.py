"""The rows of the metrics table about KV pages: the prefix cache and the KV tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from moe_serve.cache.events.publisher import EventStats
from moe_serve.cache.tiers.store import LoadResult, SaveResult, TierStats
from moe_serve.engine.request.stats import EngineStats
from moe_serve.http.metrics.scrape import MetricRow, Samples, Scrape, ScrapePart


def _cache_config(scrape: Scrape) -> Samples:
    """The values have vLLM's spelling, because gateways that route by free pages read them."""
    num_pages, facts = scrape.stats.load.num_pages, scrape.cache
    return {
        (
            str(facts.page_size),
            str(num_pages),
            str(num_pages * facts.page_size),
            str(facts.has_prefix_cache),
            facts.dtype,
        ): 1.0
    }


_engine = ScrapePart[EngineStats](lambda scrape: scrape.stats, is_vllm=True)
_cache = ScrapePart[Scrape](lambda scrape: scrape, is_vllm=True)
_CACHE_ROWS = (
    _cache.gauge(
        "cache_config_info",
        "1; the labels give the tokens per KV page, the number of pages and of tokens they hold, "
        "whether the prefix cache is on, and the data type.",
        _cache_config,
        "block_size",
        "num_gpu_blocks",
        "kv_cache_size_tokens",
        "enable_prefix_caching",
        "cache_dtype",
    ),
    _engine.counter(
        "prompt_tokens_by_source",
        "Prompt tokens of started sequences, each counted once: found in the prefix cache "
        "(local_cache_hit) or computed (local_compute).",
        lambda e: {
            ("local_compute",): e.counts.num_missed_tokens,
            ("local_cache_hit",): e.counts.num_hit_tokens,
        },
        "source",
    ),
    _engine.histogram(
        "kv_block_lifetime_seconds",
        "Time from the allocation of a sampled page until the prefix cache evicted it.",
        lambda e: e.counts.page_times.lifetime,
    ),
    _engine.histogram(
        "kv_block_idle_before_evict_seconds",
        "Time from the last use or allocation of a sampled page until its eviction.",
        lambda e: e.counts.page_times.idle,
    ),
    _engine.histogram(
        "kv_block_reuse_gap_seconds",
        "Time between two sequences that found the same sampled page.",
        lambda e: e.counts.page_times.reuse_gap,
    ),
)


def _by_tier(value: Callable[[TierStats], float]) -> Callable[[TierStats], Samples]:
    """Returns a row's values for a tier, and for the memory in front of it if ranks share one."""
    return lambda t: {(each.name,): float(value(each)) for each in t.parts}


def _by_result(
    counts: Callable[[TierStats], Mapping[str, int]], results: Iterable[str]
) -> Callable[[TierStats], Samples]:
    """Returns a row's values by tier and result."""
    return lambda t: {
        (each.name, result): counts(each).get(result, 0) for each in t.parts for result in results
    }


_tier = ScrapePart[TierStats](lambda scrape: scrape.stats.tier, "kv_tier_")
_external = ScrapePart[TierStats](lambda scrape: scrape.stats.tier, is_vllm=True)
_TIER_ROWS = (
    _external.counter(
        "external_prefix_cache_queries",
        "Prompt tokens that were not in the prefix cache and were looked up in the KV tier.",
        lambda t: t.queried_tokens,
    ),
    _external.counter(
        "external_prefix_cache_hits",
        "Prompt tokens whose pages were loaded from the KV tier.",
        lambda t: t.hit_tokens,
    ),
    _tier.gauge(
        "enabled",
        "1 if the tier reads and writes, 0 while it opens or after a failure.",
        _by_tier(lambda t: t.is_reading and t.is_writing),
        "tier",
    ),
    _tier.gauge("pages", "Pages in the tier.", _by_tier(lambda t: t.num_pages), "tier"),
    _tier.gauge("bytes", "Bytes that the tier takes.", _by_tier(lambda t: t.num_bytes), "tier"),
    _tier.gauge(
        "capacity_bytes",
        "Bytes that the tier may take.",
        _by_tier(lambda t: t.capacity_bytes),
        "tier",
    ),
    _tier.gauge(
        "queue_pages",
        "Pages that wait to be written.",
        _by_tier(lambda t: t.num_queued),
        "tier",
    ),
    _tier.counter("read_bytes", "Bytes of loaded pages.", _by_tier(lambda t: t.read_bytes), "tier"),
    _tier.counter(
        "written_bytes",
        "Written bytes, headers included.",
        _by_tier(lambda t: t.written_bytes),
        "tier",
    ),
    _tier.counter(
        "evicted_pages",
        "Pages removed to make room.",
        _by_tier(lambda t: t.num_evicted),
        "tier",
    ),
    _tier.counter(
        "loads",
        "Pages to load, by result: hit, late (the request computed them instead), corrupt, "
        "failed, skipped_slow (computing was expected to be faster).",
        _by_result(lambda t: t.loads, get_args(LoadResult)),
        "tier",
        "result",
    ),
    _tier.counter(
        "saves",
        "Pages to store, by result: saved, dropped (the queue or the disk was full), failed, "
        "over_budget (the limit of bytes per day was reached).",
        _by_result(lambda t: t.saves, get_args(SaveResult)),
        "tier",
        "result",
    ),
)

_events = ScrapePart[EventStats](lambda scrape: scrape.kv_events, "kv_event_")
_EVENT_ROWS = (
    _events.counter("batches", "Published batches of KV events.", lambda e: e.num_batches),
    _events.counter(
        "pages",
        "Pages reported in KV events, by change: stored or removed.",
        lambda e: {("stored",): e.num_stored, ("removed",): e.num_removed},
        "change",
    ),
    _events.counter(
        "replays",
        "Answered requests of subscribers for KV events that they had missed.",
        lambda e: e.num_replays,
    ),
)

CACHE_ROWS: tuple[MetricRow, ...] = (*_CACHE_ROWS, *_TIER_ROWS, *_EVENT_ROWS)
