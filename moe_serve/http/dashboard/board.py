"""Builds the state of the server for the dashboard, and samples it while the application runs.

All sources may be read on any thread, and are read off the event loop. Pages that ask at the same
time share one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response

from moe_serve import __version__
from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.errors import InvalidRequestError
from moe_serve.http.dashboard import parts
from moe_serve.http.dashboard.events import EventLog, EventWatch
from moe_serve.http.dashboard.facts import DashboardFacts
from moe_serve.http.dashboard.snapshot import INTERVAL_S, History, Snapshot, Sources
from moe_serve.http.gate.readiness import is_ready
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.metrics.scrape import RankSharer, RankShares

_log = logging.getLogger(__name__)

_FRESH_S = 0.4  # maximum age of an answer that is shared
_MAX_DIGITS = 18


class Board:
    """The dashboard's data of one server."""

    def __init__(
        self, server: ServerContext, placement: PlacementControl | None, facts: DashboardFacts
    ) -> None:
        self._model, self._facts = server.model, facts
        self._sources = Sources(server.generations, server.metrics.recent, placement)
        self._events, self._history = EventLog(), History()
        self._watch = EventWatch(self._events)
        self._sharer = RankSharer()
        self._started = time.time()
        self._lock = asyncio.Lock()  # guards the fields below and the sampler
        self._sampled_at = self._built_at = float("-inf")
        self._built = b""
        self._events.add("started", f"The server has started with {server.model.name}.")

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Samples while the application runs."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def state(self, since: int) -> bytes:
        """The state as JSON, with the events after `since`."""
        async with self._lock:
            now = time.monotonic()
            if now - self._built_at >= _FRESH_S:
                self._built = await asyncio.to_thread(self._build)
                self._built_at = time.monotonic()
            built = self._built
        events = msgspec.json.encode(self._events.since(since))
        return built[:-1] + b',"events":' + events + b"}"

    async def _run(self) -> None:
        while True:
            async with self._lock:
                try:
                    await asyncio.to_thread(self._sample)
                except Exception:  # the top of a task: the next sample may do better
                    _log.exception("a sample of the dashboard failed")
            await asyncio.sleep(INTERVAL_S)

    def _sample(self) -> Snapshot:
        now = self._sources.snapshot()
        if time.monotonic() - self._sampled_at >= INTERVAL_S / 2:
            self._sampled_at = time.monotonic()
            self._watch.look(now)
            self._history.add(now)
        return now

    def _build(self) -> bytes:
        """Builds the state without events. Without a lifespan of the application, it also takes a
        sample."""
        now, facts, recent = self._sample(), self._facts, self._sources.recent
        stats = now.stats
        load = facts.experts
        counts = None if load is None else load.look()
        shares: RankShares | None = None
        if self._sources.placement is not None and counts is not None:
            shares = self._sharer.of(self._sources.placement.plan(), counts.rows_LE)
        state = {
            "server": self._server_part(now),
            "now": now.at,
            "requests": parts.requests_part(stats, recent, facts),
            "tokens": {
                "prompt_total": stats.counts.num_prompt_tokens,
                "generated_total": stats.counts.num_generated_tokens,
            },
            "latency": parts.latency_part(recent),
            "kv": parts.kv_part(stats, facts.cache.page_size),
            "experts": parts.experts_part(load, counts),
            "expert_memory": parts.memory_part(stats),
            "ranks": parts.ranks_part(stats, shares),
            "placement": parts.placement_part(now.placement, shares),
            "predictor": parts.predictor_part(stats, facts.predictor),
            "step": None if facts.last_step is None else facts.last_step(),
            "history": self._history.columns(),
        }
        return msgspec.json.encode(state)

    def _server_part(self, now: Snapshot) -> parts.Part:
        return {
            "name": "moe-serve",
            "version": __version__,
            "model": self._model.name,
            "started": self._started,
            "uptime_s": round(now.at - self._started, 3),
            "is_ready": is_ready(now.stats, is_draining=now.is_draining),
            "layout": self._facts.layout,
        }


def dashboard_router(board: Board) -> APIRouter:
    router = APIRouter()

    @router.get("/dashboard/state")
    async def state(request: Request) -> Response:
        """The state. `since` is the number of the last event that the caller has."""
        since = request.query_params.get("since", "0")
        if not (since.isascii() and since.isdecimal() and len(since) <= _MAX_DIGITS):
            raise InvalidRequestError(
                "since must be the number of an event (an integer of 0 or more), got "
                f"{since[:40]!r}.",
                param="since",
            )
        body = await board.state(int(since))
        headers = {"Cache-Control": "no-store"}
        return Response(body, media_type="application/json", headers=headers)

    return router
