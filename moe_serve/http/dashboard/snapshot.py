"""A snapshot of the server's state, from which the history and the events are made."""

from __future__ import annotations

import time
from dataclasses import dataclass

from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.request.stats import EngineStats
from moe_serve.engine.routes.placement_control import PlacementBrief, PlacementControl
from moe_serve.http.generation.generation import GenerationService
from moe_serve.http.metrics.recent import RecentRequests


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    at: float  # seconds since 1970
    stats: EngineStats
    placement: PlacementBrief | None
    is_draining: bool
    num_rejected: int
    ttft_ms: float | None  # the median of the last seconds
    tpot_ms: float | None


class Sources:
    """The sources of a snapshot. Reading them never waits for the engine."""

    def __init__(
        self,
        generations: GenerationService,
        recent: RecentRequests,
        placement: PlacementControl | None,
    ) -> None:
        self.engine: EngineClient = generations.engine
        self.generations, self.recent, self.placement = generations, recent, placement

    def snapshot(self) -> Snapshot:
        """Takes a snapshot. Any thread may call it."""
        recent = self.recent
        first, following = recent.first_tokens.look(_LATELY_S), recent.next_tokens.look(_LATELY_S)
        return Snapshot(
            at=time.time(),
            stats=self.engine.stats(),
            placement=None if self.placement is None else self.placement.brief(),
            is_draining=self.generations.is_draining,
            num_rejected=recent.num_rejected,
            ttft_ms=None if first is None else first.p50,
            tpot_ms=None if following is None else following.p50,
        )


_LATELY_S = 3
