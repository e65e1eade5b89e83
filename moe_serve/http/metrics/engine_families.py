"""Metric families of the engine: its steps, cache, expert memory, batch policy and pools.

Each function yields the families of one part. Labels come from closed sets: never a rank or
anything that a client sends. A value of None is not known and gets no sample.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import Metric

from experts.memory.memory_stats import MemoryStats
from moe_serve.engine.request.client import EngineStats
from moe_serve.engine.request.policy_stats import PolicyStats
from moe_serve.engine.request.pool_stats import PoolStats
from moe_serve.engine.request.step_tokens import BOUNDS
from moe_serve.http.metrics.family_maker import FamilyMaker, Samples

WaitingReason = Literal["capacity", "deferred"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """Properties of the KV cache that come from the configuration and the model."""

    has_prefix_cache: bool = True
    page_size: int = 16  # tokens
    dtype: str = "auto"  # of its values


NO_CACHE_FACTS = CacheFacts()


def oldest_waiting_s(stats: EngineStats) -> float:
    """Seconds that the oldest sequence has waited; 0 if none waits."""
    arrival = stats.oldest_arrival
    return 0.0 if arrival is None else max(0.0, time.monotonic() - arrival)


def waiting_by_reason(stats: EngineStats) -> dict[WaitingReason, int]:
    """Splits the waiting sequences. The sum is `num_waiting`, even while the engine changes its
    counts."""
    num_left_aside = min(stats.num_left_aside, stats.num_waiting)
    return {"capacity": stats.num_waiting - num_left_aside, "deferred": num_left_aside}


def engine_families(stats: EngineStats, make: FamilyMaker) -> Iterator[Metric]:
    """The engine's counts, its steps and its waiting sequences."""
    num_used_pages = stats.num_pages - stats.num_free_pages
    yield from make.gauges(
        {
            "num_requests_running": ("Sequences in the batch.", stats.num_running),
            "num_requests_waiting": ("Sequences in the queue.", stats.num_waiting),
            "kv_cache_usage_perc": (
                "Share of the KV pages that sequences hold, 0 to 1.",
                num_used_pages / max(1, stats.num_pages),
            ),
            "prefix_cache_pages": ("KV pages in the prefix cache.", stats.num_cached_pages),
        }
    )
    yield from make.counters(
        {
            "prompt_tokens": ("Prompt tokens computed.", stats.num_prompt_tokens),
            "generation_tokens": ("Tokens generated.", stats.num_generated_tokens),
            "num_preemptions": (
                "Sequences preempted because no KV page was free.",
                stats.num_preemptions,
            ),
            "prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache.",
                stats.num_queried_tokens,
            ),
            "prefix_cache_hits": (
                "Prompt tokens found in the prefix cache.",
                stats.num_hit_tokens,
            ),
            "prompt_tokens_cached": (
                "prefix_cache_hits_total under another name that vLLM has.",
                stats.num_hit_tokens,
            ),
            "prefix_cache_evictions": (
                "Pages evicted from the prefix cache to make room.",
                stats.num_evicted_pages,
            ),
            "corrupted_requests": (
                "Sequences that failed because the model computed NaN or infinity.",
                stats.num_corrupted,
            ),
            "engine_steps": ("Steps of the engine.", stats.num_steps),
        }
    )
    yield make.histogram(
        "iteration_tokens_total",
        "Prompt tokens that a step computed, and tokens that it generated.",
        BOUNDS,
        stats.step_tokens.num_steps,
        float(stats.step_tokens.num_tokens),
    )
    yield make.gauge(
        "num_requests_waiting_by_reason",
        "Waiting sequences by reason: capacity (no seat or KV page was free) or deferred "
        "(skipped at the last look, for a prefix being computed or a later sequence).",
        {(reason,): count for reason, count in waiting_by_reason(stats).items()},
        "reason",
    )


def cache_families(stats: EngineStats, facts: CacheFacts, make: FamilyMaker) -> Iterator[Metric]:
    """The KV cache: its shape, prefix cache hits, and the lifetime of pages."""
    # The labels have vLLM's names and values, because gateways that route by free pages read them.
    labels = {
        "block_size": str(facts.page_size),
        "num_gpu_blocks": str(stats.num_pages),
        "kv_cache_size_tokens": str(stats.num_pages * facts.page_size),
        "enable_prefix_caching": str(facts.has_prefix_cache),
        "cache_dtype": facts.dtype,
    }
    yield make.gauge(
        "cache_config_info",
        "1; the labels give the tokens per KV page, the number of pages and of tokens they hold, "
        "whether the prefix cache is on, and the data type.",
        {tuple(labels.values()): 1.0},
        *labels,
    )
    yield make.counter(
        "prompt_tokens_by_source",
        "Prompt tokens of started sequences, each counted once: found in the prefix cache "
        "(local_cache_hit) or computed (local_compute).",
        {
            ("local_compute",): stats.num_missed_tokens,
            ("local_cache_hit",): stats.num_hit_tokens,
        },
        "source",
    )
    times = stats.page_times
    for name, text, histogram in (
        (
            "kv_block_lifetime_seconds",
            "Time from the allocation of a sampled page until the prefix cache evicted it.",
            times.lifetime,
        ),
        (
            "kv_block_idle_before_evict_seconds",
            "Time from the last use or allocation of a sampled page until its eviction.",
            times.idle,
        ),
        (
            "kv_block_reuse_gap_seconds",
            "Time between two sequences that found the same sampled page.",
            times.reuse_gap,
        ),
    ):
        yield make.histogram(name, text, histogram.bounds, histogram.counts, histogram.total)


def memory_families(stats: MemoryStats, make: FamilyMaker) -> Iterator[Metric]:
    """Expert memory (experts loaded on demand), summed over all processes."""
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
    yield from make.gauges(gauges, "expert_memory_")
    yield from make.counters(counters, "expert_memory_")


def batching_families(stats: PolicyStats, make: FamilyMaker) -> Iterator[Metric]:
    """The batch policy in use and its predictor."""
    yield make.gauge(
        "batch_policy",
        "1 for the policy in use; fifo while a predictor is off.",
        {(stats.policy,): 1.0},
        "policy",
    )
    yield from make.counters(
        {
            "requests_passed_over": (
                "Times that a waiting request let a later one start first.",
                stats.num_passed_over,
            ),
            "predictor_learnt": (
                "Predictions that were compared with the experts that requests chose, to train "
                "the predictor.",
                stats.num_learnt,
            ),
        }
    )
    is_on = stats.is_predictor_on
    yield from make.gauges(
        {
            "activated_experts_predicted": (
                "Experts that the last step was expected to activate, summed over micro-batches "
                "and layers.",
                stats.activated_experts,
            ),
            "predictor_recall": ("Share of the chosen experts that were predicted.", stats.recall),
            "predictor_on": (
                "Whether the predictor's recall is at its floor or above.",
                None if is_on is None else float(is_on),
            ),
        }
    )


def pool_families(stats: PoolStats, make: FamilyMaker) -> Iterator[Metric]:
    """The pools of ranks, the stages of a step and the number of micro-batches."""
    by_pool = {
        "pool_ranks": ("Ranks that took part in the last recorded steps.", "num_ranks"),
        "pool_bubble_ratio": ("Share of a pool's time without work, 0 to 1.", "bubble_ratio"),
        "pool_slowest_rank": ("The rank of a pool with the most busy time.", "slowest_rank"),
        "pool_slowest_rank_excess_ratio": (
            "Busy time of that rank over the mean of the pool's other ranks, less 1.",
            "slowest_excess",
        ),
    }
    for name, (text, field) in by_pool.items() if stats.pools else ():
        samples: Samples = {(use.pool,): getattr(use, field) for use in stats.pools}
        yield make.gauge(name, text, samples, "pool")
    if stats.stages:
        yield make.gauge(
            "pipeline_stage_seconds",
            "Time that a rank spent in a stage, such as dispatch or combine, in one of the last "
            "recorded steps.",
            {(use.stage,): use.seconds for use in stats.stages},
            "stage",
        )
    yield from make.gauges(
        {
            "exposed_communication_ratio": (
                "Share of a step in which attention ranks wait for the experts' sums.",
                stats.exposed_communication_ratio,
            ),
            "micro_batches": ("Micro-batches of the last step.", stats.micro_batches),
        }
    )
    if stats.steps:
        yield make.counter(
            "pipeline_steps",
            "Steps by their number of micro-batches and the reason for that number.",
            {(str(each.micro_batches), each.reason): each.num_steps for each in stats.steps},
            "micro_batches",
            "reason",
        )
