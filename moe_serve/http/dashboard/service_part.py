"""The service tiers and tenants of a server as data for the dashboard: targets kept in the last
minutes, and counts since the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from moe_serve.config.tiers import TierConfig, find_tier
from moe_serve.engine.request.service_stats import ServiceStats, TenantCounts, TierCounts
from moe_serve.http.metrics.service_rows import attainment

WINDOW_S = 300.0
_MAX_TENANTS = 8
_NO_TIER = TierConfig(name="")


class ServiceWindow:
    """Keeps the counts of the last minutes. Any thread may use it, but only one at a time."""

    def __init__(self, tiers: Sequence[TierConfig]) -> None:
        self._tiers = tiers
        self._samples: deque[tuple[float, dict[str, TierCounts]]] = deque()

    def add(self, now: float, stats: ServiceStats | None) -> None:
        """Adds a sample, at a time in seconds."""
        if stats is None:
            return
        self._samples.append((now, {counts.tier: counts for counts in stats.tiers}))
        while self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()

    def part(self, stats: ServiceStats | None) -> dict[str, Any] | None:
        """Returns the tiers and tenants as JSON types; None: the server has neither."""
        if stats is None:
            return None
        forecast = stats.forecast
        return {
            "order": stats.order,
            "window_s": WINDOW_S,
            "tiers": [self._tier(counts) for counts in stats.tiers],
            "tenants": [
                _tenant(each, stats.tenants) for each in stats.tenants[:_MAX_TENANTS] if each.tenant
            ],
            "num_tenants": stats.num_tenants,
            "jain_index": stats.jain_index,
            "forecast": {
                "num_compared": forecast.num_compared,
                "median_error": forecast.median_error if forecast.num_compared else None,
            },
        }

    def _tier(self, counts: TierCounts) -> dict[str, Any]:
        before = self._samples[0][1].get(counts.tier) if self._samples else None
        lately = counts if before is None else _since(before, counts)
        config = find_tier(self._tiers, counts.tier) or _NO_TIER
        ended = lately.num_finished
        return {
            "name": counts.tier,
            "weight": config.weight,
            "targets": {
                name: seconds
                for name in ("ttft", "tpot", "e2e")
                if (seconds := getattr(config, f"{name}_s")) is not None
            },
            "finished": ended,
            "good": lately.num_good / ended if ended else None,
            "attained": attainment(lately),
            "mean_tardiness_s": lately.tardiness_s / ended if ended else None,
            "finished_total": counts.num_finished,
            "refused_total": counts.num_refused,
            "expired_total": counts.num_expired,
            "relegated_total": counts.num_relegated,
            "runaways_total": counts.num_runaways,
            "kept_total": counts.num_promises_kept,
            "broken_total": counts.num_promises_broken,
        }


def _since(before: TierCounts, now: TierCounts) -> TierCounts:
    """Returns the counts that were added between two samples. A restarted engine counts from 0
    again."""
    names = [field.name for field in fields(TierCounts) if field.name != "tier"]
    grown = {name: max(0, getattr(now, name) - getattr(before, name)) for name in names}
    return TierCounts(tier=now.tier, **grown)


def _tenant(tenant: TenantCounts, tenants: Sequence[TenantCounts]) -> dict[str, Any]:
    total = sum(each.service_s for each in tenants)
    return {
        "tier": tenant.tier,
        "name": tenant.tenant,
        "service_s": tenant.service_s,
        "share": tenant.service_s / total if total > 0 else 0.0,
        "finished": tenant.num_finished,
        "good": tenant.num_good / tenant.num_finished if tenant.num_finished else None,
    }
