"""Whether the server wants new requests."""

from __future__ import annotations

from moe_serve.engine.request.client import EngineStats

OUTAGE_S = 1.0  # of ranks; a shorter one is not worth a client's attention


def is_ready(stats: EngineStats, *, is_draining: bool) -> bool:
    """As /health/ready has it."""
    return stats.is_alive and not is_draining and stats.outage_s <= OUTAGE_S
