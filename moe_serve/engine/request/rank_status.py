"""The state of a rank of either pool, for dashboards and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_serve.engine.request.pool_stats import Pool

RankPhase = Literal["starting", "loading", "ready", "serving"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """A snapshot of one rank, filled by the coordinator."""

    name: str  # expert-0
    pool: Pool
    phase: RankPhase
    num_restarts: int  # of its process, since the server began
    busy_ratio: float | None  # share of the last recorded steps in which it worked
