"""The tiers and tenants of /dashboard/state: shares of the last minutes, counts since the start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.service_stats import (
    ForecastError,
    ServiceStats,
    TenantCounts,
    TierCounts,
)
from moe_serve.http.dashboard.service_part import WINDOW_S, ServiceWindow

TIERS = (TierConfig(name="interactive", weight=4.0, ttft_s=1.0, e2e_s=9.0), TierConfig(name="flex"))


def stats(finished: int, good: int, **others: Any) -> ServiceStats:
    counts = TierCounts(
        tier="interactive",
        num_finished=finished,
        num_good=good,
        num_with_ttft=finished,
        num_ttft_met=good,
        tardiness_s=float(finished - good),
        num_refused=7,
    )
    return ServiceStats(order="atc", tiers=(counts, TierCounts(tier="flex")), **others)


def first_tier(window: ServiceWindow, now: ServiceStats) -> dict[str, Any]:
    part = window.part(now)
    assert part is not None
    found: dict[str, Any] = part["tiers"][0]
    return found


def test_a_server_without_tiers_has_no_part() -> None:
    window = ServiceWindow(())
    window.add(1.0, None)
    assert window.part(None) is None


def test_shares_are_of_the_last_minutes() -> None:
    window = ServiceWindow(TIERS)
    assert first_tier(window, stats(10, 5))["good"] == 0.5, "no sample yet: since the start"
    window.add(0.0, stats(10, 5))
    window.add(100.0, stats(20, 14))
    tier = first_tier(window, stats(20, 14))
    assert (tier["finished"], tier["good"], tier["attained"]) == (10, 0.9, {"ttft": 0.9})
    assert (tier["mean_tardiness_s"], tier["finished_total"], tier["refused_total"]) == (0.1, 20, 7)
    assert (tier["weight"], tier["targets"]) == (4.0, {"ttft": 1.0, "e2e": 9.0})
    window.add(WINDOW_S + 50.0, stats(24, 14))
    assert first_tier(window, stats(24, 14))["good"] == 0.0, "the first sample is too old"
    idle = first_tier(window, replace(stats(20, 14)))
    assert (idle["finished"], idle["good"], idle["mean_tardiness_s"]) == (0, None, None)


def test_an_engine_that_started_again_gives_no_negative_counts() -> None:
    window = ServiceWindow(TIERS)
    window.add(0.0, stats(10, 5))
    tier = first_tier(window, stats(2, 1))
    assert (tier["finished"], tier["good"]) == (0, None)


def test_tenants_and_the_error_of_forecasts() -> None:
    tenants = [TenantCounts(tier="flex", tenant=f"t{i}", service_s=1.0) for i in range(20)]
    named = TenantCounts(
        tier="interactive", tenant="acme", service_s=20.0, num_finished=4, num_good=3
    )
    everyone = TenantCounts(tier="flex", tenant="", service_s=0.0)
    found = ServiceWindow(TIERS).part(
        stats(0, 0, tenants=(named, everyone, *tenants), num_tenants=500, jain_index=0.5)
    )
    assert found is not None
    assert found["tenants"][0] == {
        "tier": "interactive",
        "name": "acme",
        "service_s": 20.0,
        "share": 0.5,
        "finished": 4,
        "good": 0.75,
    }
    assert len(found["tenants"]) == 7, "eight entries, of which one has no name"
    assert (found["num_tenants"], found["jain_index"]) == (500, 0.5)
    assert found["forecast"] == {"num_compared": 0, "median_error": None}
    known = ForecastError(num_compared=3, median_error=0.2)
    later = ServiceWindow(TIERS).part(stats(0, 0, forecast=known))
    assert later is not None and later["forecast"]["median_error"] == 0.2
