"""The table of all metrics, in the order of the page.

`/metrics`, the table in docs/operate/observability.md and the panels of the Grafana dashboard take
names and help texts from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import get_args

import numpy as np

from moe_serve.engine.memory.memory_plan import MemoryPlan
from moe_serve.engine.request.stats import EngineStats, Pool, RankPhase
from moe_serve.engine.routes.placement_control import PlacementStatus
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.metrics.cell_rows import CELL_ROWS
from moe_serve.http.metrics.engine_rows import ENGINE_ROWS
from moe_serve.http.metrics.finished_sequence import FinishedSequence
from moe_serve.http.metrics.lora_rows import ADAPTER_ROWS
from moe_serve.http.metrics.recent import TokenGaps
from moe_serve.http.metrics.scrape import (
    Buckets,
    ExpertScrape,
    Kind,
    MetricRow,
    RankShares,
    Samples,
    Scrape,
    ScrapePart,
)
from moe_serve.http.metrics.service_rows import SERVICE_ROWS


def _balances(status: PlacementStatus) -> Samples:
    balance = status.balance
    return {
        ("before",): balance.before,
        ("predicted",): balance.predicted,
        ("achieved",): balance.achieved,
    }


_placement = ScrapePart[PlacementStatus](lambda scrape: scrape.placement, "placement_")
_PLACEMENT_ROWS = (
    _placement.gauge(
        "version", "Lower bound of the number of placement switches.", lambda p: p.version
    ),
    _placement.gauge(
        "age_seconds", "Time since the last switch, or since the start.", lambda p: p.age_s
    ),
    _placement.gauge(
        "moving", "1 while experts move, else 0.", lambda p: float(p.state == "copying")
    ),
    _placement.counter(
        "copied_bytes", "Bytes of experts that ranks read for moves.", lambda p: p.num_bytes
    ),
    _placement.counter("copies", "Copies of experts that were moved.", lambda p: p.num_copies),
    _placement.counter(
        "plans",
        "Plans by outcome.",
        lambda p: {(outcome,): count for outcome, count in p.num_plans.items()},
        "outcome",
    ),
    _placement.gauge(
        "balancedness",
        "Mean over max load of the expert ranks, mean over layers.",
        _balances,
        "kind",
    ),
    _placement.gauge(
        "step_p99_seconds",
        "The 99th percentile of step times around the last move.",
        lambda p: {("before",): p.before_p99_s, ("during",): p.during_p99_s},
        "when",
    ),
)

_TTFT = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_E2E = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_PREEMPTIONS = (0, 1, 2, 3, 5, 10, 20)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)
_HTTP = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0)


def _observed(
    name: str, text: str, *labels: str, buckets: Buckets = (), is_vllm: bool = False
) -> MetricRow:
    """Returns a histogram, or without `buckets` a counter, that ServerMetrics observes."""
    kind: Kind = "histogram" if buckets else "counter"
    return MetricRow(name, kind, text, labels, buckets=buckets, is_vllm=is_vllm)


def _of_request(
    name: str,
    text: str,
    buckets: Buckets,
    value: Callable[[FinishedSequence], float | None] | None,
) -> MetricRow:
    """Returns a histogram of finished sequences. `value` None: it is not known for one sequence
    alone."""
    name = f"request_{name}"
    return MetricRow(name, "histogram", text, buckets=buckets, of_request=value, is_vllm=True)


_gaps = ScrapePart[TokenGaps](lambda scrape: scrape.token_gaps, is_vllm=True)
_REQUEST_ROWS = (
    _observed(
        "time_to_first_token_seconds",
        "Time from request to first token.",
        buckets=_TTFT,
        is_vllm=True,
    ),
    _gaps.histogram(
        "inter_token_latency_seconds",
        "Time between two tokens of a sequence.",
        lambda gaps: gaps.snapshot(),
    ),
    _observed(
        "e2e_request_latency_seconds",
        "Time from request to last token.",
        buckets=_E2E,
        is_vllm=True,
    ),
    _observed("event_loop_lag_seconds", "Delay of the event loop's clock ticks.", buckets=_LAG),
    _of_request(
        "queue_time_seconds", "Time from request to first step.", _SECONDS, lambda s: s.queue_s
    ),
    _of_request(
        "prefill_time_seconds",
        "Time from first step to first token.",
        _SECONDS,
        lambda s: s.prefill_s,
    ),
    _of_request(
        "decode_time_seconds", "Time from first to last token.", _SECONDS, lambda s: s.decode_s
    ),
    _of_request(
        "inference_time_seconds",
        "Time from first step to last token.",
        _SECONDS,
        lambda s: s.inference_s,
    ),
    _of_request(
        "time_per_output_token_seconds",
        "Mean of the tokens after the first.",
        _TPOT,
        lambda s: s.tpot_s,
    ),
    _of_request(
        "prompt_tokens",
        "Tokens of the prompt, cached or not.",
        _TOKENS,
        lambda s: len(s.request.prompt_token_ids),
    ),
    _of_request(
        "prefill_kv_computed_tokens",
        "Prompt tokens that were not found in the prefix cache.",
        _TOKENS,
        lambda s: s.num_computed_tokens,
    ),
    _of_request(
        "num_preemptions",
        "Times that the sequence was preempted because no KV page was free.",
        _PREEMPTIONS,
        lambda s: s.num_preemptions,
    ),
    _of_request("generation_tokens", "Tokens of the answer.", _TOKENS, lambda s: s.num_tokens),
    _of_request("max_num_generation_tokens", "Tokens of a prompt's longest choice.", _TOKENS, None),
    _of_request(
        "params_n",
        "Choices requested for a prompt.",
        _CHOICES,
        lambda s: s.request.params.n if s.request.choice == 0 else None,
    ),
    _of_request(
        "params_max_tokens",
        "Maximum answer length that was requested, in tokens.",
        _TOKENS,
        lambda s: s.request.rules.max_tokens,
    ),
    _observed("request_success", "Sequences that ended.", "finished_reason", is_vllm=True),
    _observed("kv_window_requests", "Ended sequences that had a `kv_window`."),
    _observed(
        "kv_window_dropped_tokens",
        "Tokens in the pages that a `kv_window` gave back, for ended sequences. Only whole pages "
        "count.",
    ),
    _observed("admission_rejections", "Requests that were not accepted.", "reason", is_vllm=True),
    _observed(
        "tool_call_parser_invocations",
        "Messages parsed for tool calls; malformed: a call began but could not be parsed.",
        "parser",
        "outcome",
    ),
    _observed("http_requests", "HTTP requests.", "route", "status"),
    _observed(
        "http_request_duration_seconds",
        "Time from an HTTP request to the end of its answer.",
        "route",
        buckets=_HTTP,
    ),
)


def _phase_seconds(startup: Startup) -> Samples:
    return {(phase.name,): phase.seconds for phase in startup.phases if phase.name != "ready"}


def _planned_bytes(plan: MemoryPlan) -> Samples:
    return {
        ("weights",): sum(process.weights for process in plan.processes),
        ("kv_pages",): sum(process.kv_bytes for process in plan.processes),
        ("dispatch_buffers",): sum(process.buffers for process in plan.processes),
        ("adapters",): sum(process.adapters for process in plan.processes),
    }


def _ranks_by_phase(stats: EngineStats) -> Samples:
    counts = Counter((rank.pool, rank.phase) for rank in stats.members)
    return {
        (pool, phase): counts[pool, phase]
        for pool in get_args(Pool)
        for phase in get_args(RankPhase)
    }


_server = ScrapePart[Scrape](lambda scrape: scrape)
_startup = ScrapePart[Startup](lambda scrape: scrape.startup)
_plan = ScrapePart[MemoryPlan](lambda scrape: scrape.startup.plan)
_ranks = ScrapePart[EngineStats](lambda scrape: scrape.stats if scrape.stats.members else None)
_SERVER_ROWS = (
    _server.gauge(
        "ready",
        "1 while the server accepts new requests, as /health/ready reports, else 0.",
        lambda scrape: float(scrape.is_ready),
    ),
    _server.gauge(
        "oldest_waiting_seconds",
        "How long the oldest sequence in the queue has been waiting.",
        lambda scrape: scrape.oldest_waiting_s,
    ),
    _startup.gauge("startup_seconds", "Duration of a phase of the start.", _phase_seconds, "phase"),
    _plan.gauge(
        "planned_memory_bytes",
        "Memory that the plan before the start assigns to a purpose, summed over all processes.",
        _planned_bytes,
        "purpose",
    ),
    _ranks.counter(
        "rank_losses", "Times that a rank was declared lost.", lambda stats: stats.num_lost_ranks
    ),
    _ranks.gauge("ranks", "Ranks by phase.", _ranks_by_phase, "pool", "phase"),
)


def _activated(experts: ExpertScrape) -> Samples:
    mean_L = experts.window.activated_mean
    return {} if mean_L is None else _by_layer(experts, mean_L.tolist())


def _max_over_mean(experts: ExpertScrape) -> Samples:
    if not experts.window.num_steps:
        return {}
    rows_LE = experts.window.rows_LE
    ratios_L = rows_LE.max(axis=1) / np.maximum(1e-9, rows_LE.mean(axis=1))
    return _by_layer(experts, ratios_L.tolist())


def _by_layer(experts: ExpertScrape, values_L: list[float]) -> Samples:
    return {(str(layer),): value for layer, value in zip(experts.layers, values_L, strict=True)}


def _tokens_of_each(experts: ExpertScrape) -> Samples | None:
    if not experts.has_each:
        return None
    return {
        (str(layer), str(expert)): count
        for layer, rows_E in zip(experts.layers, experts.total.rows_LE.tolist(), strict=True)
        for expert, count in enumerate(rows_E)
    }


_experts = ScrapePart[ExpertScrape](lambda scrape: scrape.experts)
_shares = ScrapePart[RankShares](
    lambda scrape: None if scrape.experts is None else scrape.experts.shares
)
_EXPERT_ROWS = (
    _experts.counter(
        "expert_counted_tokens",
        "Tokens whose experts were counted.",
        lambda experts: experts.total.num_tokens,
    ),
    _experts.counter(
        "expert_counted_steps",
        "Steps whose experts were counted.",
        lambda experts: experts.total.num_steps,
    ),
    _experts.gauge(
        "activated_experts",
        "Different experts that a step activates, on average.",
        _activated,
        "layer",
    ),
    _experts.gauge(
        "expert_load_max_over_mean",
        "Rows of the busiest expert over the mean.",
        _max_over_mean,
        "layer",
    ),
    _shares.gauge(
        "placement_replicas",
        "Copies of experts beyond the first.",
        lambda shares: shares.num_replicas,
    ),
    _shares.gauge(
        "expert_rank_balancedness",
        "Mean over max rows of the expert ranks in the last minute, mean over layers.",
        lambda shares: {(): shares.balance},
    ),
    _experts.counter(
        "expert_tokens", "Counted tokens that chose an expert.", _tokens_of_each, "layer", "expert"
    ),
)

METRICS: tuple[MetricRow, ...] = (
    *ENGINE_ROWS,
    *CELL_ROWS,
    *SERVICE_ROWS,
    *ADAPTER_ROWS,
    *_PLACEMENT_ROWS,
    *_REQUEST_ROWS,
    *_SERVER_ROWS,
    *_EXPERT_ROWS,
)
