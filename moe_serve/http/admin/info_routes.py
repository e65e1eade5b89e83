"""GET /version and /load."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from moe_serve import __version__
from moe_serve.engine.request.client import EngineStats
from moe_serve.engine.request.rank_load import RankLoad
from moe_serve.http.generation.context import ServerContext


def info_router(server: ServerContext) -> APIRouter:
    router = APIRouter()
    engine = server.generations.engine

    @router.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": __version__}

    @router.get("/load")
    async def load() -> dict[str, Any]:
        """The load of the server. As in vLLM, `server_load` counts HTTP requests that generate
        now."""
        stats = engine.stats()
        return {
            "server_load": server.generations.num_open,
            **_load(stats),
            "ranks": [{"rank": rank.name, **_load(rank)} for rank in stats.ranks],
        }

    return router


def _load(load: EngineStats | RankLoad) -> dict[str, Any]:
    num_used = load.num_pages - load.num_free_pages
    return {
        "num_requests_running": load.num_running,
        "num_requests_waiting": load.num_waiting,
        "kv_cache_usage": num_used / max(1, load.num_pages),
        "num_kv_pages": load.num_pages,
    }
