"""Decides whether the server is ready for new requests."""

from __future__ import annotations

from moe_serve.engine.request.stats import EngineStats

OUTAGE_S = 1.0  # of missing ranks; shorter outages are not reported to clients


def is_ready(stats: EngineStats, *, is_draining: bool) -> bool:
    """True if the server is ready, as /health/ready reports."""
    return stats.is_alive and not is_draining and stats.outage_s <= OUTAGE_S
