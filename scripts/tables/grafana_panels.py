"""The panels of the Grafana dashboard: queries for Prometheus, and titles.

In a query, `<name>` is the metric moe_serve:name of the servers that are selected above the panels,
and `<name|kind="achieved">` is the same with one more label.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moe_serve.http.metrics.scrape import PREFIX

CHOSEN = 'model_name=~"$model_name",instance=~"$instance"'
_METRIC = re.compile(r"<(\w+)(?:\|([^>]+))?>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram. `queries`: {legend: query}; `unit` as Grafana spells it.

    `about` is shown before the help texts of the metrics.
    """

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    about: str = ""


def query_text(query: str) -> str:
    """Returns the query in Prometheus's syntax."""

    def selector(match: re.Match[str]) -> str:
        more = f",{match[2]}" if match[2] else ""
        return f"{PREFIX}{match[1]}{{{CHOSEN}{more}}}"

    return _METRIC.sub(selector, query)


def metric_names(query: str) -> list[str]:
    """Returns the names of the samples that a query reads, without the prefix."""
    return [match[1] for match in _METRIC.finditer(query)]


def _rate(name: str, by: str = "instance") -> str:
    return f"sum by ({by}) (rate(<{name}>[$__rate_interval]))"


def _per(part: str, whole: str, by: str = "instance") -> str:
    """Returns a query that divides the growth of one counter by that of another."""
    return f"{_rate(part, by)} / {_rate(whole, by)}"


def _quantiles(name: str) -> dict[str, str]:
    buckets = _rate(f"{name}_bucket", "le")
    return {f"p{q}": f"histogram_quantile(0.{q}, {buckets})" for q in (50, 90, 99)}


def _p90(name: str, by: str = "le") -> str:
    return f"histogram_quantile(0.9, {_rate(f'{name}_bucket', by)})"


_STAGES = ("queue", "prefill", "decode")
_REQUESTS = (
    Panel(
        title="Sequences",
        queries={
            "running": "sum(<num_requests_running>)",
            "waiting: {{reason}}": "sum by (reason) (<num_requests_waiting_by_reason>)",
        },
    ),
    Panel(
        title="Waiting time, estimated",
        unit="s",
        about="Sequences that wait over sequences that start in a second (Little's law).",
        queries={
            "{{instance}}": "sum by (instance) (avg_over_time(<num_requests_waiting>[5m]))"
            " / sum by (instance) (rate(<time_to_first_token_seconds_count>[5m]))"
        },
    ),
    Panel(
        title="Ends, rejections, preemptions",
        unit="reqps",
        queries={
            "{{finished_reason}}": _rate("request_success_total", "finished_reason"),
            "rejected: {{reason}}": _rate("admission_rejections_total", "reason"),
            "preempted": _rate("num_preemptions_total", "model_name"),
        },
    ),
    Panel(
        title="HTTP answers by status",
        unit="reqps",
        queries={"{{status}}": _rate("http_requests_total", "status")},
    ),
    Panel(
        title="Tokens per second",
        queries={
            "generated {{instance}}": _rate("generation_tokens_total"),
            "prompts {{instance}}": _rate("prompt_tokens_total"),
        },
    ),
    Panel(
        title="Steps per second",
        unit="ops",
        queries={"{{instance}}": _rate("engine_steps_total")},
    ),
    Panel(
        title="Drafted tokens that were accepted",
        unit="percentunit",
        about="Empty if speculation is off.",
        queries={
            "{{instance}}": _per(
                "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"
            )
        },
    ),
)
_LATENCY = (
    Panel(
        title="Time to first token",
        unit="s",
        queries=_quantiles("time_to_first_token_seconds"),
    ),
    Panel(
        title="Time between tokens (TPOT)",
        unit="s",
        queries=_quantiles("inter_token_latency_seconds"),
    ),
    Panel(
        title="Time to the last token",
        unit="s",
        queries=_quantiles("e2e_request_latency_seconds"),
    ),
    Panel(
        title="Where a request's time goes, p90",
        unit="s",
        queries={name: _p90(f"request_{name}_time_seconds") for name in _STAGES},
    ),
    Panel(title="Tokens of a step", queries=_quantiles("iteration_tokens_total")),
    Panel(
        title="HTTP requests by route, p90",
        unit="s",
        about="To the end of the answer: a stream's whole length.",
        queries={"{{route}}": _p90("http_request_duration_seconds", "le, route")},
    ),
)
_CACHE = (
    Panel(
        title="KV pages held by sequences",
        unit="percentunit",
        queries={"{{instance}}": "<kv_cache_usage_perc>"},
    ),
    Panel(
        title="Pages in the prefix cache",
        queries={
            "{{instance}}": "<prefix_cache_pages>",
            "evicted per second {{instance}}": _rate("prefix_cache_evictions_total"),
        },
    ),
    Panel(
        title="Prompt tokens found in the prefix cache",
        unit="percentunit",
        queries={"{{instance}}": _per("prefix_cache_hits_total", "prefix_cache_queries_total")},
    ),
    Panel(
        title="Prompt tokens of sequences that start",
        about="Per second.",
        queries={"{{source}}": _rate("prompt_tokens_by_source_total", "source")},
    ),
    Panel(
        title="How long pages stay in the prefix cache",
        unit="s",
        about="The 90th percentiles of sampled pages. Gaps near the idle time before eviction: a "
        "larger cache would find more.",
        queries={
            "from hand-out to eviction": _p90("kv_block_lifetime_seconds"),
            "unused before eviction": _p90("kv_block_idle_before_evict_seconds"),
            "between two uses": _p90("kv_block_reuse_gap_seconds"),
        },
    ),
)
_RANKS = (
    Panel(
        title="Ranks",
        about="By how far they are: one that was lost starts again.",
        queries={"{{pool}} {{phase}} {{instance}}": "<ranks>"},
    ),
    Panel(
        title="Ranks lost",
        about="Within the hour before; also those that were back at once.",
        queries={"{{instance}}": "increase(<rank_losses_total>[1h])"},
    ),
    Panel(
        title="Bubbles",
        unit="percentunit",
        queries={
            "{{pool}} {{instance}}": "<pool_bubble_ratio>",
            "exposed communication {{instance}}": "<exposed_communication_ratio>",
        },
    ),
    Panel(
        title="Slowest rank beyond the others",
        unit="percentunit",
        queries={"{{pool}} {{instance}}": "<pool_slowest_rank_excess_ratio>"},
    ),
    Panel(
        title="Micro-batches of the last step (m)",
        queries={"{{instance}}": "<micro_batches>"},
    ),
    Panel(
        title="Steps by micro-batches and reason",
        unit="ops",
        queries={
            "m={{micro_batches}}, {{reason}}": _rate(
                "pipeline_steps_total", "micro_batches, reason"
            )
        },
    ),
)
_EXPERTS = (
    Panel(
        title="Experts that the last step was expected to activate",
        queries={"{{instance}}": "<activated_experts_predicted>"},
    ),
    Panel(
        title="Predictor",
        unit="percentunit",
        queries={"recall {{instance}}": "<predictor_recall>", "on {{instance}}": "<predictor_on>"},
    ),
    Panel(
        title="Requests passed over; predictions learnt from",
        unit="ops",
        queries={
            "passed over {{instance}}": _rate("requests_passed_over_total"),
            "learnt {{instance}}": _rate("predictor_learnt_total"),
        },
    ),
    Panel(
        title="Expert memory: needed experts that were in it",
        unit="percentunit",
        queries={
            "experts {{instance}}": _per("expert_memory_hits_total", "expert_memory_needed_total"),
            "choices of rows {{instance}}": _per(
                "expert_memory_row_hits_total", "expert_memory_rows_total"
            ),
            "read ahead and needed {{instance}}": _per(
                "expert_memory_prefetch_hits_total", "expert_memory_prefetches_total"
            ),
            "foretold and needed {{instance}}": _per(
                "expert_memory_foreseen_total", "expert_memory_foretold_total"
            ),
        },
    ),
    Panel(
        title="Expert memory: bytes read",
        unit="Bps",
        queries={"{{instance}}": _rate("expert_memory_read_bytes_total")},
    ),
    Panel(
        title="Expert memory: share of time waited for it",
        unit="percentunit",
        about="Of all processes together, so beyond 1 where several wait at once.",
        queries={"{{instance}}": _rate("expert_memory_wait_seconds_total")},
    ),
)
_PLACEMENT = (
    Panel(
        title="Balance of the expert ranks",
        unit="percentunit",
        about="1 is even.",
        queries={"{{kind}} {{instance}}": "<placement_balancedness>"},
    ),
    Panel(
        title="Placement version, and whether experts move",
        queries={
            "version {{instance}}": "<placement_version>",
            "moving {{instance}}": "<placement_moving>",
        },
    ),
    Panel(
        title="Plans per hour, by outcome",
        queries={"{{outcome}}": "sum by (outcome) (increase(<placement_plans_total>[1h]))"},
    ),
    Panel(
        title="Bytes copied for moves",
        unit="Bps",
        queries={"{{instance}}": _rate("placement_copied_bytes_total")},
    ),
    Panel(
        title="Copies of experts moved in an hour",
        queries={"{{instance}}": "sum by (instance) (increase(<placement_copies_total>[1h]))"},
    ),
    Panel(
        title="p99 of step times around the last move",
        unit="s",
        queries={"{{when}} {{instance}}": "<placement_step_p99_seconds>"},
    ),
)
_SERVICE = (
    Panel(
        title="Requests that kept all their targets, by tier",
        unit="percentunit",
        about="Empty without service tiers, as all panels of this row.",
        queries={"{{tier}}": _per("tier_good_requests_total", "tier_requests_total", "tier")},
    ),
    Panel(
        title="Requests that kept a target",
        unit="percentunit",
        queries={
            "{{tier}} {{target}}": _per(
                "tier_target_met_total", "tier_target_requests_total", "tier, target"
            )
        },
    ),
    Panel(
        title="Refused, relegated, expired; promises",
        unit="reqps",
        queries={
            "refused: {{tier}}": _rate("tier_refused_total", "tier"),
            "relegated: {{tier}}": _rate("tier_relegated_total", "tier"),
            "runaways: {{tier}}": _rate("tier_runaways_total", "tier"),
            "expired: {{tier}}": _rate("tier_expired_total", "tier"),
            "promises {{outcome}}": _rate("tier_promises_total", "outcome"),
        },
    ),
    Panel(
        title="Shares of the tenants",
        unit="percentunit",
        queries={
            "{{tier}} {{tenant}}": "<tenant_share>",
            "evenness (Jain) {{instance}}": "<tenant_jain_index>",
        },
    ),
    Panel(
        title="Error of the forecasts of the first token",
        unit="percentunit",
        queries={"{{instance}}": "<first_token_forecast_error_ratio>"},
    ),
)
ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Requests": _REQUESTS,
    "Latency": _LATENCY,
    "Service tiers": _SERVICE,
    "KV cache": _CACHE,
    "Attention and expert ranks": _RANKS,
    "Experts": _EXPERTS,
    "Placement": _PLACEMENT,
}
