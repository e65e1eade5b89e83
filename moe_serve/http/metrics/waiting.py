"""Who waits for a first step: for how long, and for what."""

from __future__ import annotations

import time
from typing import Literal

from moe_serve.engine.request.client import EngineStats

WaitingReason = Literal["capacity", "deferred"]


def oldest_waiting_s(stats: EngineStats) -> float:
    """0 where nobody waits."""
    arrival = stats.oldest_arrival
    return 0.0 if arrival is None else max(0.0, time.monotonic() - arrival)


def waiting_by_reason(stats: EngineStats) -> dict[WaitingReason, int]:
    """The two add up to `num_waiting`, also while the engine's thread changes what is read."""
    num_left_aside = min(stats.num_left_aside, stats.num_waiting)
    return {"capacity": stats.num_waiting - num_left_aside, "deferred": num_left_aside}
