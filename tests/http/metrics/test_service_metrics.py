"""The metrics of tiers, tenants and forecasts."""

from __future__ import annotations

import math

from moe_serve.cache.histogram import Histogram
from moe_serve.engine.request.service_stats import (
    DECISION_BOUNDS,
    ForecastError,
    ServiceStats,
    TenantCounts,
    TierCounts,
)
from moe_serve.engine.request.stats import EngineStats
from moe_serve.http.metrics.service_rows import attainment
from tests.support.http.full_metrics import metrics_text

CHAT = TierCounts(
    tier="interactive",
    num_finished=10,
    num_good=7,
    num_goodput_tokens=70,
    num_with_ttft=10,
    num_ttft_met=8,
    num_with_e2e=4,
    num_e2e_met=1,
    tardiness_s=2.5,
    num_refused=3,
    num_runaways=2,
    num_promises_kept=5,
    num_promises_broken=1,
)
STATS = ServiceStats(
    order="atc",
    tiers=(CHAT, TierCounts(tier="flex", num_expired=2)),
    output_limits=(400.0, math.inf),
    tenants=(
        TenantCounts(tier="interactive", tenant="acme", service_s=6.0, num_finished=4, num_good=3),
        TenantCounts(tier="interactive", tenant="user:bob <img>", service_s=3.0),
        TenantCounts(tier="flex", tenant="key:0123456789ab", service_s=1.0),
        TenantCounts(tier="flex", tenant=""),
    ),
    num_tenants=1_000_000,
    jain_index=0.7,
    forecast=ForecastError(num_compared=9, median_error=0.2, p90_ratio=1.6),
    decisions=Histogram(
        bounds=DECISION_BOUNDS, counts=(3, *([0] * (len(DECISION_BOUNDS) - 1)), 1), total=0.5
    ),
)


def lines(stats: EngineStats) -> list[str]:
    """Returns the samples of tiers, tenants and forecasts, without the model's label."""
    kinds = ("order_decision", "tier_", "tenant", "first_token_forecast")
    page = metrics_text(stats)
    for label in ('model_name="m",', ',model_name="m"', '{model_name="m"}'):
        page = page.replace(label, "")
    named = tuple(f"moe_serve:{kind}" for kind in kinds)
    return [line for line in page.splitlines() if line.startswith(named)]


def test_without_tiers_there_are_none() -> None:
    assert lines(EngineStats()) == []


def test_counts_of_every_tier() -> None:
    found = lines(EngineStats(service=STATS))
    for line in (
        'tier_requests_total{tier="interactive"} 10.0',
        'tier_good_requests_total{tier="interactive"} 7.0',
        'tier_goodput_tokens_total{tier="interactive"} 70.0',
        'tier_target_requests_total{target="ttft",tier="interactive"} 10.0',
        'tier_target_met_total{target="e2e",tier="interactive"} 1.0',
        'tier_weighted_tardiness_seconds_total{tier="interactive"} 2.5',
        'tier_refused_total{tier="interactive"} 3.0',
        'tier_expired_total{tier="flex"} 2.0',
        'tier_runaways_total{tier="interactive"} 2.0',
        'tier_predicted_output_limit_tokens{tier="interactive"} 400.0',
        'tier_promises_total{outcome="kept",tier="interactive"} 5.0',
        'tier_promises_total{outcome="broken",tier="interactive"} 1.0',
        "first_token_forecast_error_ratio 0.2",
        "first_token_forecast_p90_ratio 1.6",
        "tenant_jain_index 0.7",
        "tenants 1e+06",
        'order_decision_seconds_bucket{le="2e-05"} 3.0',
        "order_decision_seconds_count 4.0",
        "order_decision_seconds_sum 0.5",
    ):
        assert f"moe_serve:{line}" in found
    assert not any("limit" in line and "flex" in line for line in found), "it has none"
    assert not any('target="tpot"' in line for line in found), "no request had that target"


def test_names_that_clients_chose_are_no_labels() -> None:
    found = [line for line in lines(EngineStats(service=STATS)) if "tenant=" in line]
    assert {line.split('tenant="')[1].split('"')[0] for line in found} == {
        "acme",
        "key:0123456789ab",
    }
    assert 'moe_serve:tenant_share{tenant="acme",tier="interactive"} 0.6' in found
    assert 'moe_serve:tenant_service_seconds_total{tenant="acme",tier="interactive"} 6.0' in found
    assert 'moe_serve:tenant_good_requests_total{tenant="acme",tier="interactive"} 3.0' in found


def test_attainment_is_known_only_for_targets_that_requests_had() -> None:
    assert attainment(CHAT) == {"ttft": 0.8, "e2e": 0.25}
    assert attainment(TierCounts(tier="flex")) == {}
