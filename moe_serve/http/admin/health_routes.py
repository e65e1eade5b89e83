"""GET /health/live, /health/ready, /health, /ping and /metrics.

Live means that the process should not be restarted. Ready means that the server accepts new
requests; /health and /ping are other common names of /health/ready. A busy engine is live. An
engine that has sequences to run but has made no progress for `server.hang_report_s` is not live.
While ranks that every step needs are missing, requests wait: the server is live, but not ready.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from moe_serve.engine.request.client import EngineStats
from moe_serve.http.gate.readiness import OUTAGE_S
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.schema.errors import ApiError, draining_error, engine_dead_error


class ProgressWatch:
    """Measures how long the engine has had work without making progress.

    An engine that records the time of its last turn is asked for it. For other engines the watch
    uses its own calls: how long they have seen the same step number while sequences were
    running.
    """

    def __init__(self) -> None:
        self._num_steps = -1
        self._since = 0.0

    def stalled_for(self, stats: EngineStats, now: float) -> float:
        if stats.outage_s:
            return 0.0  # it waits for its ranks, and this wait has its own time limit
        if stats.last_turn_age_s is not None:
            has_work = stats.num_running > 0 or stats.num_waiting > 0
            return stats.last_turn_age_s if has_work else 0.0
        if stats.num_steps != self._num_steps or stats.num_running == 0:
            self._num_steps, self._since = stats.num_steps, now
        return now - self._since


def health_router(server: ServerContext) -> APIRouter:
    router = APIRouter()
    watch = ProgressWatch()
    engine = server.generations.engine

    def check_progress(stats: EngineStats) -> None:
        stalled_s = watch.stalled_for(stats, time.monotonic())
        if stalled_s > server.config.hang_report_s:
            raise ApiError(
                503,
                f"The engine has made no step for {stalled_s:.0f} s with {stats.num_running} "
                f"sequences running and {stats.num_waiting} waiting (step {stats.num_steps}).",
                code="engine_stalled",
            )

    @router.get("/health/live")
    async def live() -> dict[str, Any]:
        stats = engine.stats()
        if not stats.is_alive:
            raise engine_dead_error()
        check_progress(stats)
        return {
            "status": "live",
            "num_steps": stats.num_steps,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
        }

    @router.get("/health")
    @router.get("/ping")
    @router.get("/health/ready")
    async def ready() -> dict[str, Any]:
        stats = engine.stats()
        if not stats.is_alive:
            raise engine_dead_error()
        if server.generations.is_draining:
            raise draining_error("The server is shutting down.")
        if stats.outage_s > OUTAGE_S:
            raise ApiError(
                503,
                f"Ranks that every step needs have been missing for {stats.outage_s:.0f} s; "
                "requests wait for their return.",
                code="ranks_away",
            )
        check_progress(stats)
        return {
            "status": "ready",
            "model": server.model.name,
            "last_error": _last_error(stats),
        }

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router


def _last_error(stats: EngineStats) -> dict[str, Any] | None:
    """When the last error happened. Its cause is only in the log, because this route needs no
    key."""
    if stats.last_error_age_s is None:
        return None
    return {"code": "generation_failed", "seconds_ago": round(stats.last_error_age_s, 1)}
