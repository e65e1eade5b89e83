"""How long the oldest request has been waiting for its first step."""

from __future__ import annotations

import time

from moe_serve.engine.client import EngineStats


def oldest_waiting_s(stats: EngineStats) -> float:
    """0 where nobody waits."""
    arrival = stats.oldest_arrival
    return 0.0 if arrival is None else max(0.0, time.monotonic() - arrival)
