"""The rows of the metrics table that read the engine: steps, cache, expert memory, batch policy,
pools, and recordings of the routing."""

from __future__ import annotations

from experts.memory.memory_stats import MemoryStats
from moe_serve.cache.histogram import Histogram
from moe_serve.engine.request.draft_counts import DraftCounts
from moe_serve.engine.request.stats import EngineStats, PolicyStats, PoolStats
from moe_serve.engine.request.step_tokens import BOUNDS
from moe_serve.engine.tracing import TracingStatus
from moe_serve.http.metrics.cache_rows import CACHE_ROWS
from moe_serve.http.metrics.scrape import MetricRow, Samples, ScrapePart


def _step_tokens(stats: EngineStats) -> Histogram:
    tokens = stats.counts.step_tokens
    return Histogram(bounds=BOUNDS, counts=tokens.num_steps, total=float(tokens.num_tokens))


def _waiting_by_reason(stats: EngineStats) -> Samples:
    """Splits the waiting sequences. The sum is `num_waiting`, even while the engine changes its
    counts."""
    num_left_aside = min(stats.load.num_left_aside, stats.load.num_waiting)
    return {
        ("capacity",): stats.load.num_waiting - num_left_aside,
        ("deferred",): num_left_aside,
    }


_engine = ScrapePart[EngineStats](lambda scrape: scrape.stats)
_as_vllm = ScrapePart[EngineStats](lambda scrape: scrape.stats, is_vllm=True)
_ENGINE_ROWS = (
    _as_vllm.gauge("num_requests_running", "Sequences in the batch.", lambda e: e.load.num_running),
    _as_vllm.gauge("num_requests_waiting", "Sequences in the queue.", lambda e: e.load.num_waiting),
    _as_vllm.gauge(
        "kv_cache_usage_perc",
        "Share of the KV pages that sequences hold, 0 to 1.",
        lambda e: e.load.used_share,
    ),
    _engine.gauge(
        "prefix_cache_pages", "KV pages in the prefix cache.", lambda e: e.load.num_cached_pages
    ),
    _as_vllm.counter(
        "prompt_tokens", "Prompt tokens computed.", lambda e: e.counts.num_prompt_tokens
    ),
    _as_vllm.counter(
        "generation_tokens", "Tokens generated.", lambda e: e.counts.num_generated_tokens
    ),
    _as_vllm.counter(
        "num_preemptions",
        "Sequences preempted because no KV page was free.",
        lambda e: e.counts.num_preemptions,
    ),
    _as_vllm.counter(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda e: e.counts.num_queried_tokens,
    ),
    _as_vllm.counter(
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda e: e.counts.num_hit_tokens,
    ),
    _as_vllm.counter(
        "prompt_tokens_cached",
        "prefix_cache_hits_total under another name that vLLM has.",
        lambda e: e.counts.num_hit_tokens,
    ),
    _engine.counter(
        "prefix_cache_evictions",
        "Pages evicted from the prefix cache to make room.",
        lambda e: e.counts.num_evicted_pages,
    ),
    _as_vllm.counter(
        "corrupted_requests",
        "Sequences that failed because the model computed NaN or infinity.",
        lambda e: e.counts.num_corrupted,
    ),
    _engine.counter("engine_steps", "Steps of the engine.", lambda e: e.num_steps),
    _as_vllm.histogram(
        "iteration_tokens_total",
        "Prompt tokens that a step computed, and tokens that it generated.",
        _step_tokens,
    ),
    _as_vllm.gauge(
        "num_requests_waiting_by_reason",
        "Waiting sequences by reason: capacity (no seat or KV page was free) or deferred "
        "(skipped at the last look, for a prefix being computed or a later sequence).",
        _waiting_by_reason,
        "reason",
    ),
)


# Expert memory (experts loaded on demand), summed over all processes.
_memory = ScrapePart[MemoryStats](lambda scrape: scrape.stats.expert_memory, "expert_memory_")
_MEMORY_ROWS = (
    _memory.gauge("budget_bytes", "Memory for packed experts.", lambda m: m.budget_bytes),
    _memory.gauge("resident_bytes", "Packed experts in this memory.", lambda m: m.resident_bytes),
    _memory.gauge(
        "hit_rate", "Share of needed experts that were in memory, 0 to 1.", lambda m: m.hit_rate
    ),
    _memory.counter("needed", "Experts that layers needed.", lambda m: m.num_needed),
    _memory.counter(
        "hits", "Needed experts that were in memory when the rows came.", lambda m: m.num_hits
    ),
    _memory.counter(
        "late", "Needed experts that were being read when the rows came.", lambda m: m.num_late
    ),
    _memory.counter("rows", "Experts that rows chose, counted for each row.", lambda m: m.num_rows),
    _memory.counter(
        "row_hits", "Choices of experts that were in memory.", lambda m: m.num_row_hits
    ),
    _memory.counter("reads", "Experts read.", lambda m: m.num_reads),
    _memory.counter("read_bytes", "Bytes of the experts read, packed.", lambda m: m.bytes_read),
    _memory.counter(
        "prefetches", "Experts read before they were needed.", lambda m: m.num_prefetched
    ),
    _memory.counter(
        "prefetch_hits",
        "Prefetched experts that were needed before they were evicted.",
        lambda m: m.num_prefetch_hits,
    ),
    _memory.counter(
        "foretold",
        "Experts that the next-layer predictor expected rows to need.",
        lambda m: m.num_foretold,
    ),
    _memory.counter("foreseen", "Predicted experts that were needed.", lambda m: m.num_foreseen),
    _memory.counter(
        "passes",
        "Passes over the rows of a layer; more than one if its experts do not fit at once.",
        lambda m: m.num_passes,
    ),
    _memory.counter(
        "wait_seconds", "Time that layers waited for experts.", lambda m: m.wait_seconds
    ),
)

_drafts = ScrapePart[DraftCounts](lambda scrape: scrape.drafts)
_drafts_as_vllm = ScrapePart[DraftCounts](
    lambda scrape: scrape.drafts, "spec_decode_num_", is_vllm=True
)
_DRAFT_ROWS = (
    _drafts_as_vllm.counter(
        "drafts",
        "Drafts that steps verified, by the drafter that proposed them.",
        lambda d: {(source,): counts.num_drafts for source, counts in d.by_source.items()},
        "source",
    ),
    _drafts_as_vllm.counter(
        "draft_tokens",
        "Drafted tokens that steps verified.",
        lambda d: {(source,): counts.num_drafted for source, counts in d.by_source.items()},
        "source",
    ),
    _drafts_as_vllm.counter(
        "accepted_tokens",
        "Drafted tokens that were accepted, which are generated tokens too.",
        lambda d: {(source,): counts.num_accepted for source, counts in d.by_source.items()},
        "source",
    ),
    _drafts_as_vllm.counter(
        "accepted_tokens_per_pos",
        "Accepted tokens by their position in the draft, counted from 0.",
        lambda d: {(str(p),): count for p, count in enumerate(d.accepted_by_position)},
        "position",
    ),
    _drafts.counter(
        "speculation_drafter_seconds",
        "Time that the engine's thread spent on finding drafts.",
        lambda d: d.drafter_s,
    ),
)

_policy = ScrapePart[PolicyStats](lambda scrape: scrape.stats.batching)
_POLICY_ROWS = (
    _policy.gauge(
        "batch_policy",
        "1 for the policy in use; fifo while a predictor is off.",
        lambda p: {(p.policy,): 1.0},
        "policy",
    ),
    _policy.counter(
        "requests_passed_over",
        "Times that a waiting request let a later one start first.",
        lambda p: p.num_passed_over,
    ),
    _policy.counter(
        "predictor_learnt",
        "Predictions that were compared with the experts that requests chose, to train the "
        "predictor.",
        lambda p: p.num_learnt,
    ),
    _policy.gauge(
        "activated_experts_predicted",
        "Experts that the last step was expected to activate, summed over micro-batches and "
        "layers.",
        lambda p: p.activated_experts,
    ),
    _policy.gauge(
        "predictor_recall", "Share of the chosen experts that were predicted.", lambda p: p.recall
    ),
    _policy.gauge(
        "predictor_on",
        "1 while the predictor is used: its recall is at its minimum or above; else 0.",
        lambda p: None if p.is_predictor_on is None else float(p.is_predictor_on),
    ),
)

# `or None`: without recorded steps the server does not have the metric.
_pools = ScrapePart[PoolStats](lambda scrape: scrape.stats.pools)
_POOL_ROWS = (
    _pools.gauge(
        "pool_ranks",
        "Ranks that took part in the last recorded steps.",
        lambda p: {(use.pool,): use.num_ranks for use in p.pools} or None,
        "pool",
    ),
    _pools.gauge(
        "pool_bubble_ratio",
        "Share of a pool's time without work, 0 to 1.",
        lambda p: {(use.pool,): use.bubble_ratio for use in p.pools} or None,
        "pool",
    ),
    _pools.gauge(
        "pool_slowest_rank",
        "The rank of a pool with the most busy time.",
        lambda p: {(use.pool,): use.slowest_rank for use in p.pools} or None,
        "pool",
    ),
    _pools.gauge(
        "pool_slowest_rank_excess_ratio",
        "Busy time of that rank over the mean of the pool's other ranks, less 1.",
        lambda p: {(use.pool,): use.slowest_excess for use in p.pools} or None,
        "pool",
    ),
    _pools.gauge(
        "pipeline_stage_seconds",
        "Time that a rank spent in a stage, such as dispatch or combine, in one of the last "
        "recorded steps.",
        lambda p: {(use.stage,): use.seconds for use in p.stages} or None,
        "stage",
    ),
    _pools.gauge(
        "exposed_communication_ratio",
        "Share of a step in which attention ranks wait for the experts' sums.",
        lambda p: p.exposed_communication_ratio,
    ),
    _pools.gauge("micro_batches", "Micro-batches of the last step.", lambda p: p.micro_batches),
    _pools.counter(
        "pipeline_steps",
        "Steps by their number of micro-batches and the reason for that number.",
        lambda p: {(str(s.micro_batches), s.reason): s.num_steps for s in p.steps} or None,
        "micro_batches",
        "reason",
    ),
)

_trace = ScrapePart[TracingStatus](lambda scrape: scrape.tracing, "trace_")
_TRACE_ROWS = (
    _trace.gauge("recording", "1 while recording, else 0.", lambda t: float(t.is_recording)),
    _trace.counter("tokens", "Tokens whose routing was recorded.", lambda t: t.total.num_tokens),
    _trace.counter(
        "bytes", "Bytes of recordings that were written.", lambda t: t.total.num_written_bytes
    ),
    _trace.counter(
        "dropped_parts",
        "Files of recordings that were deleted to stay below trace.max_bytes.",
        lambda t: t.total.num_dropped_parts,
    ),
    _trace.counter(
        "lost_tokens",
        "Recorded tokens that could not be written to disk.",
        lambda t: t.total.num_lost_tokens,
    ),
)

ENGINE_ROWS: tuple[MetricRow, ...] = (
    *_ENGINE_ROWS,
    *CACHE_ROWS,
    *_MEMORY_ROWS,
    *_DRAFT_ROWS,
    *_POLICY_ROWS,
    *_POOL_ROWS,
    *_TRACE_ROWS,
)
