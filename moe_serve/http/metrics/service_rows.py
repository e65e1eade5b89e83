"""The rows of the metrics table about service tiers, tenants and forecasts of the first token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from moe_serve.engine.request.service_stats import (
    ForecastError,
    ServiceStats,
    TenantCounts,
    TierCounts,
)
from moe_serve.http.metrics.scrape import MetricRow, Samples, ScrapePart

CLIENTS_OWN = "user:"  # tenants that clients have named: their names are never labels
_TARGETS = ("ttft", "tpot", "e2e")


def by_key(tenants: Sequence[TenantCounts]) -> list[TenantCounts]:
    """Returns the tenants whose names come from the operator or are digests of keys."""
    return [each for each in tenants if each.tenant and not each.tenant.startswith(CLIENTS_OWN)]


def attainment(counts: TierCounts) -> dict[str, float]:
    """Returns the share of the requests with a target that kept it, by target."""
    pairs = {name: _of_target(counts, name) for name in _TARGETS}
    return {name: met / total for name, (met, total) in pairs.items() if total}


def _of_target(counts: TierCounts, name: str) -> tuple[int, int]:
    """(requests that kept the target, requests that had it)."""
    return getattr(counts, f"num_{name}_met"), getattr(counts, f"num_with_{name}")


def _each(value: Callable[[TierCounts], float]) -> Callable[[ServiceStats], Samples]:
    """Reads a value of every tier."""
    return lambda stats: {(counts.tier,): value(counts) for counts in stats.tiers}


def _targets(which: int) -> Callable[[ServiceStats], Samples]:
    """Reads one of the counts of each target of every tier."""
    return lambda stats: {
        (counts.tier, name): pair[which]
        for counts in stats.tiers
        for name in _TARGETS
        if (pair := _of_target(counts, name))[1]
    }


def _promises(stats: ServiceStats) -> Samples:
    return {
        (counts.tier, outcome): count
        for counts in stats.tiers
        for outcome, count in (
            ("kept", counts.num_promises_kept),
            ("broken", counts.num_promises_broken),
        )
    }


def _output_limits(stats: ServiceStats) -> Samples:
    limits = zip(stats.tiers, stats.output_limits, strict=False)
    return {(counts.tier,): limit for counts, limit in limits if math.isfinite(limit)}


def _of_tenant(value: Callable[[TenantCounts], float]) -> Callable[[ServiceStats], Samples]:
    return lambda stats: {(each.tier, each.tenant): value(each) for each in by_key(stats.tenants)}


def _shares(stats: ServiceStats) -> Samples:
    """Shares of the service of all tenants in the snapshot, those that clients named included."""
    total = sum(each.service_s for each in stats.tenants)
    return {
        (each.tier, each.tenant): each.service_s / total
        for each in by_key(stats.tenants)
        if total > 0
    }


_tiers = ScrapePart[ServiceStats](
    lambda scrape: scrape.stats.service if _has_tiers(scrape.stats.service) else None, "tier_"
)
_service = ScrapePart[ServiceStats](lambda scrape: scrape.stats.service)
_forecast = ScrapePart[ForecastError](
    lambda scrape: None if scrape.stats.service is None else scrape.stats.service.forecast,
    "first_token_forecast_",
)


def _has_tiers(stats: ServiceStats | None) -> bool:
    return stats is not None and bool(stats.tiers)


SERVICE_ROWS: tuple[MetricRow, ...] = (
    _tiers.counter(
        "requests",
        "Sequences that ended, except those whose client disconnected.",
        _each(lambda c: c.num_finished),
        "tier",
    ),
    _tiers.counter(
        "good_requests",
        "Sequences that kept all their targets (goodput).",
        _each(lambda c: c.num_good),
        "tier",
    ),
    _tiers.counter(
        "goodput_tokens",
        "Generated tokens of these sequences.",
        _each(lambda c: c.num_goodput_tokens),
        "tier",
    ),
    _tiers.counter(
        "target_requests",
        "Sequences that ended and had a target: ttft, tpot or e2e.",
        _targets(1),
        "tier",
        "target",
    ),
    _tiers.counter(
        "target_met",
        "Sequences that kept this target. Attainment is this count over target_requests.",
        _targets(0),
        "tier",
        "target",
    ),
    _tiers.counter(
        "weighted_tardiness_seconds",
        "Delay beyond the target of the first or last token, times the tier's weight.",
        _each(lambda c: c.tardiness_s),
        "tier",
    ),
    _tiers.counter(
        "relegated",
        "Sequences that were moved behind the others because their target was out of reach.",
        _each(lambda c: c.num_relegated),
        "tier",
    ),
    _tiers.counter(
        "runaways",
        "Sequences whose answers reached the predicted limit of their tier "
        "(predicted_output_limit).",
        _each(lambda c: c.num_runaways),
        "tier",
    ),
    _tiers.gauge(
        "predicted_output_limit_tokens",
        "The predicted limit for a new sequence, from the recent answers of the tier; absent "
        "until there are enough.",
        _output_limits,
        "tier",
    ),
    _tiers.counter(
        "refused",
        "Requests refused before they were queued, because their target could not be met.",
        _each(lambda c: c.num_refused),
        "tier",
    ),
    _tiers.counter(
        "expired",
        "Strict requests that were ended because they missed their deadline.",
        _each(lambda c: c.num_expired),
        "tier",
    ),
    _tiers.counter(
        "urgent_preemptions",
        "Times that a running sequence had to give its seat to a more urgent one.",
        _each(lambda c: c.num_urgent_preemptions),
        "tier",
    ),
    _tiers.counter(
        "promises",
        "Accepted requests that could have been refused, by whether they kept their target.",
        _promises,
        "tier",
        "outcome",
    ),
    _service.counter(
        "tenant_service_seconds",
        "Predicted time of the work done for a tenant, for the 20 tenants with the most. Tenants "
        "that are named only in the field `user` are left out.",
        _of_tenant(lambda each: each.service_s),
        "tier",
        "tenant",
    ),
    _service.counter(
        "tenant_requests",
        "Sequences of these tenants that ended.",
        _of_tenant(lambda each: each.num_finished),
        "tier",
        "tenant",
    ),
    _service.counter(
        "tenant_good_requests",
        "Sequences of these tenants that kept all their targets.",
        _of_tenant(lambda each: each.num_good),
        "tier",
        "tenant",
    ),
    _service.gauge(
        "tenant_share",
        "Share of a tenant in the service of the 20 tenants with the most, 0 to 1.",
        _shares,
        "tier",
        "tenant",
    ),
    _service.gauge("tenants", "Tenants that the scheduler remembers.", lambda s: s.num_tenants),
    _service.gauge(
        "tenant_jain_index",
        "Evenness of the service of the n tenants that have requests: 1 if all get the same, 1/n "
        "if one tenant gets everything.",
        lambda s: s.jain_index,
    ),
    _service.histogram(
        "order_decision_seconds",
        "Time to order the waiting sequences for a step, on the engine's thread.",
        lambda s: s.decisions,
    ),
    _forecast.counter(
        "compared",
        "Forecasts of a first token that were compared with its actual time.",
        lambda f: f.num_compared,
    ),
    _forecast.gauge(
        "error_ratio",
        "Median of |actual - predicted| / actual of the recent forecasts.",
        lambda f: f.median_error if f.num_compared else {},
    ),
    _forecast.gauge(
        "p90_ratio",
        "Factor of the cautious forecast, which nine of ten first tokens kept.",
        lambda f: f.p90_ratio,
    ),
)
