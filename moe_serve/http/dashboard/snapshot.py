"""Snapshots of the server's state, and one sample per second of the last five minutes."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.request.stats import EngineStats
from moe_serve.engine.routes.placement_control import PlacementBrief, PlacementControl
from moe_serve.http.generation.generation import GenerationService
from moe_serve.http.metrics.recent import RecentRequests

INTERVAL_S = 1.0
_NUM_SAMPLES = 300


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


class History:
    """A ring buffer of samples. Any thread may add and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: Snapshot | None = None
        self._samples: deque[dict[str, float | None]] = deque(maxlen=_NUM_SAMPLES)

    def add(self, now: Snapshot) -> None:
        """Adds a sample with rates since the previous snapshot. The first snapshot has no rates: no
        sample."""
        with self._lock:
            before, self._before = self._before, now
            if before is not None and now.at > before.at:
                self._samples.append(_sample(before, now))

    def columns(self) -> dict[str, Any]:
        """One list per quantity, all of the same length; `kv_used` counts pages."""
        with self._lock:
            samples = list(self._samples)
        names = (
            "t",
            "running",
            "waiting",
            "prompt_per_s",
            "generated_per_s",
            "ttft_ms",
            "tpot_ms",
            "kv_used",
        )
        columns = {name: [sample[name] for sample in samples] for name in names}
        return {"interval_s": INTERVAL_S, **columns}


def _sample(before: Snapshot, now: Snapshot) -> dict[str, float | None]:
    stats, seconds = now.stats, now.at - before.at
    num_prompt = stats.counts.num_prompt_tokens - before.stats.counts.num_prompt_tokens
    num_generated = stats.counts.num_generated_tokens - before.stats.counts.num_generated_tokens
    return {
        "t": round(now.at, 3),
        "running": stats.load.num_running,
        "waiting": stats.load.num_waiting,
        "prompt_per_s": round(max(0, num_prompt) / seconds, 1),
        "generated_per_s": round(max(0, num_generated) / seconds, 1),
        "ttft_ms": now.ttft_ms,
        "tpot_ms": now.tpot_ms,
        "kv_used": stats.load.num_used_pages,
    }
