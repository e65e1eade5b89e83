"""Counts waiting sequences, and how long the oldest has waited."""

from __future__ import annotations

import time
from typing import Literal

from moe_serve.engine.request.client import EngineStats

WaitingReason = Literal["capacity", "deferred"]


def oldest_waiting_s(stats: EngineStats) -> float:
    """Seconds that the oldest sequence has waited; 0 if none waits."""
    arrival = stats.oldest_arrival
    return 0.0 if arrival is None else max(0.0, time.monotonic() - arrival)


def waiting_by_reason(stats: EngineStats) -> dict[WaitingReason, int]:
    """Splits the waiting sequences. The sum is `num_waiting`, even while the engine changes its
    counts."""
    num_left_aside = min(stats.num_left_aside, stats.num_waiting)
    return {"capacity": stats.num_waiting - num_left_aside, "deferred": num_left_aside}
