"""Routes for the state of the server: health, load, model, start and hang report.

    GET /health/live, /health/ready, /health, /ping and /metrics
    GET /version, /load and /server_info
    GET /v1/models and /v1/models/{id}
    GET /startup returns the phases of the server's start and the memory plan
    GET /admin/hang returns the hang report of this moment; it needs an admin key

Live means that the process should not be restarted. Ready means that the server accepts new
requests; /health and /ping are other common names of /health/ready. A busy engine is live. An
engine that has sequences to run but has made no progress for `server.hang_report_s` is not live.
While ranks that every step needs are missing, requests wait: the server is live, but not ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_serve import __version__
from moe_serve.adapters.adapter import AdapterVersion
from moe_serve.engine.memory.memory_plan import MemoryPlan
from moe_serve.engine.request.stats import EngineLoad, EngineStats
from moe_serve.engine.watch.hang_watch import HangWatch
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.gate.auth import ADMIN_PREFIX
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.metrics.scrape import OUTAGE_S
from moe_serve.http.schema.api_error import ApiError, draining_error, engine_dead_error
from moe_serve.http.wire.late_routes import LateRouter

FORMATS = frozenset({"text", "json"})
_ASKED = "endpoint-load-metrics-format"
_TOLD = "endpoint-load-metrics"
_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations"}
)


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
            return 0.0  # the engine waits for its ranks, and this wait has its own time limit
        if stats.last_turn_age_s is not None:
            has_work = stats.load.num_running > 0 or stats.load.num_waiting > 0
            return stats.last_turn_age_s if has_work else 0.0
        if stats.num_steps != self._num_steps or stats.load.num_running == 0:
            self._num_steps, self._since = stats.num_steps, now
        return now - self._since


def health_router(server: ServerContext) -> LateRouter:
    router = LateRouter()
    watch = ProgressWatch()
    engine = server.generations.engine

    def check_progress(stats: EngineStats) -> None:
        stalled_s = watch.stalled_for(stats, time.monotonic())
        if stalled_s > server.config.hang_report_s:
            raise ApiError(
                503,
                f"The engine has made no step for {stalled_s:.0f} s with {stats.load.num_running} "
                f"sequences running and {stats.load.num_waiting} waiting (step {stats.num_steps}).",
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
            "num_running": stats.load.num_running,
            "num_waiting": stats.load.num_waiting,
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
        return Response(server.metrics_page.render(), media_type=CONTENT_TYPE_LATEST)

    return router


def _last_error(stats: EngineStats) -> dict[str, Any] | None:
    """Returns the time of the last error. Its cause is only in the log, because this route needs no
    key."""
    if stats.last_error_age_s is None:
        return None
    return {"code": "generation_failed", "seconds_ago": round(stats.last_error_age_s, 1)}


def info_router(server: ServerContext) -> LateRouter:
    router = LateRouter()
    engine = server.generations.engine

    @router.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": __version__}

    @router.get("/load")
    async def load() -> dict[str, Any]:
        """Returns the load of the server. As in vLLM, `server_load` counts the HTTP requests that
        generate now.
        """
        stats = engine.stats()
        return {
            "server_load": server.generations.num_open,
            **_load(stats.load),
            "ranks": [{"rank": rank.name, **_load(rank.load)} for rank in stats.ranks],
        }

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """Answers what the SGLang gateway asks before it sends requests. All attention ranks
        are one worker for it, as requests do not choose a rank."""
        model = server.model
        return {
            "model_path": model.root or model.name,
            "served_model_name": model.name,
            "version": __version__,
            "max_model_len": model.max_model_len,
            "dp_size": 1,
        }

    return router


def _load(load: EngineLoad) -> dict[str, Any]:
    return {
        "num_requests_running": load.num_running,
        "num_requests_waiting": load.num_waiting,
        "kv_cache_usage": load.used_share,
        "num_kv_pages": load.num_pages,
    }


def model_router(server: ServerContext) -> LateRouter:
    router = LateRouter()
    model = server.model
    entry: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "moe-serve",
        "root": model.root or model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }

    def of_adapter(version: AdapterVersion) -> dict[str, Any]:
        own = {"id": version.name, "created": version.loaded_at, "parent": model.name}
        return {**entry, **own, "root": version.folder.name, "digest": version.digest.hex()}

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        versions = [] if model.adapters is None else model.adapters.versions()
        return {"object": "list", "data": [entry, *(of_adapter(each) for each in versions)]}

    @router.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> dict[str, Any]:
        model.check_name(model_id)
        version = model.version(model_id)
        return entry if version is None else of_adapter(version)

    return router


def startup_router(startup: Startup) -> LateRouter:
    router = LateRouter()

    @router.get("/startup")
    async def show() -> dict[str, Any]:
        return startup_json(startup)

    return router


def startup_json(startup: Startup) -> dict[str, Any]:
    """Returns the start as JSON. `phase` is the current one; `memory` is null until it is
    planned."""
    phases = startup.phases
    return {
        "phase": phases[-1].name,
        "phases": [asdict(phase) for phase in phases],
        "memory": None if startup.plan is None else _plan_json(startup.plan),
    }


def _plan_json(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "processes": [{**asdict(process), "total": process.total} for process in plan.processes],
        "rooms": [{**asdict(room), "needed": plan.needed(room)} for room in plan.rooms],
    }


def hang_router(hangs: HangWatch) -> LateRouter:
    router = LateRouter(prefix=ADMIN_PREFIX)

    @router.get("/hang", response_class=Response)
    async def report() -> Response:
        text = await asyncio.to_thread(hangs.report)
        return Response(text, media_type="text/plain; charset=utf-8")

    return router


class LoadReportMiddleware:
    """Adds the server's load to the answers of generating routes, for balancers (ORCA).

    A client asks with `endpoint-load-metrics-format: TEXT` or `JSON`, and gets vLLM's two values:

        endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.…=3.0
        endpoint-load-metrics: JSON {"named_metrics":{"kv_cache_usage_perc":0.25,…}}

    A streamed answer has the load at its start, a complete one the load at its end.
    """

    def __init__(self, app: ASGIApp, stats: Callable[[], EngineStats]) -> None:
        self._app, self._stats = app, stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get(_ASKED, "").strip().lower()
        if wanted not in FORMATS:
            await self._app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                MutableHeaders(scope=message)[_TOLD] = load_report(self._stats(), wanted)
            await send(message)

        await self._app(scope, receive, send_with_load)


def load_report(stats: EngineStats, wanted: str) -> str:
    """Returns the value of the header in one of `FORMATS`."""
    metrics = {
        "kv_cache_usage_perc": stats.load.used_share,
        "num_requests_waiting": float(stats.load.num_waiting),
    }
    if wanted == "json":
        return f"JSON {msgspec.json.encode({'named_metrics': metrics}).decode()}"
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
