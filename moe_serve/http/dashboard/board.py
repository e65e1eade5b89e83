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
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from moe_serve import __version__
from moe_serve.cache.tiers.store import TierStats
from moe_serve.config.sections import SpeculationConfig
from moe_serve.engine.request.stats import EngineStats
from moe_serve.engine.routes.cell_placements import AnyPlacement, CellPlacements
from moe_serve.engine.routes.placement_control import PlacementBrief
from moe_serve.engine.watch.expert_load import WINDOW_S, ExpertCounts, ExpertLoad
from moe_serve.errors import InvalidRequestError
from moe_serve.http.dashboard.adapters_part import adapters_part
from moe_serve.http.dashboard.cells_part import CellPlacementsPart, cells_part, scaling_part
from moe_serve.http.dashboard.facts import DashboardFacts, PredictorFacts
from moe_serve.http.dashboard.service_part import ServiceWindow
from moe_serve.http.dashboard.snapshot import (
    INTERVAL_S,
    EventLog,
    EventWatch,
    History,
    Snapshot,
    Sources,
    tokens_per_step,
)
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.metrics.recent import WINDOW_S as LATENCY_WINDOW_S
from moe_serve.http.metrics.recent import RecentRequests
from moe_serve.http.metrics.scrape import RankSharer, RankShares, is_ready, oldest_waiting_s
from moe_serve.http.wire.late_routes import LateRouter

_log = logging.getLogger(__name__)

_FRESH_S = 0.4  # maximum age of an answer that is shared
_MAX_DIGITS = 18


class Board:
    """The dashboard's data of one server."""

    def __init__(
        self, server: ServerContext, placement: AnyPlacement | None, facts: DashboardFacts
    ) -> None:
        self._model, self._facts = server.model, facts
        self._placements = CellPlacementsPart()
        self._sources = Sources(server.generations, server.metrics.recent, placement)
        self._events, self._history = EventLog(), History()
        self._watch = EventWatch(self._events)
        self._sharer = RankSharer()
        self._service = ServiceWindow(server.tiers.tiers)
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
        """Returns the state as JSON, with the events after `since`."""
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
                except Exception:  # the top of a task: the next sample may succeed
                    _log.exception("a sample of the dashboard failed")
            await asyncio.sleep(INTERVAL_S)

    def _sample(self) -> Snapshot:
        now = self._sources.snapshot()
        if time.monotonic() - self._sampled_at >= INTERVAL_S / 2:
            self._sampled_at = time.monotonic()
            self._watch.look(now)
            self._history.add(now)
            self._service.add(now.at, now.stats.service)
        return now

    def _build(self) -> bytes:
        """Builds the state without events. Without a lifespan of the application, it also takes a
        sample."""
        now, facts, recent = self._sample(), self._facts, self._sources.recent
        stats = now.stats
        load = facts.experts
        counts = None if load is None else load.look()
        shares: RankShares | None = None
        placement = self._sources.placement
        if counts is not None and not (placement is None or isinstance(placement, CellPlacements)):
            shares = self._sharer.of(placement.plan(), counts.rows_LE)
        state = {
            "server": self._server_part(now),
            "now": now.at,
            "requests": requests_part(stats, recent, facts),
            "tokens": {
                "prompt_total": stats.counts.num_prompt_tokens,
                "generated_total": stats.counts.num_generated_tokens,
            },
            "latency": latency_part(recent),
            "kv": kv_part(stats, recent, facts.cache.page_size),
            "experts": experts_part(load, counts),
            "expert_memory": memory_part(stats),
            "ranks": ranks_part(stats, shares),
            "cells": cells_part(stats),
            "autoscale": scaling_part(stats),
            "placement": placement_part(now.placements.get(""), shares),
            "cell_placements": self._placements.part(placement),
            "predictor": predictor_part(stats, facts.predictor),
            "speculation": speculation_part(stats, facts.speculation),
            "service": self._service.part(stats.service),
            "adapters": adapters_part(self._model.adapters, self._sources.generations),
            "step": None if facts.last_step is None else facts.last_step(),
            "history": self._history.columns(),
        }
        return msgspec.json.encode(state)

    def _server_part(self, now: Snapshot) -> Part:
        return {
            "name": "moe-serve",
            "version": __version__,
            "model": self._model.name,
            "started": self._started,
            "uptime_s": round(now.at - self._started, 3),
            "is_ready": is_ready(now.stats, is_draining=now.is_draining),
            "layout": self._facts.layout,
        }


def dashboard_router(board: Board) -> LateRouter:
    router = LateRouter()

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


Part = dict[str, Any]


def speculation_part(stats: EngineStats, config: SpeculationConfig) -> Part | None:
    """Returns the counts of all drafts since the start. `tokens_per_step` is the number of tokens
    that a sequence gets from one step.
    """
    if not config.is_on:
        return None
    drafts, num_generated = stats.counts.drafts, stats.counts.num_generated_tokens
    total = drafts.total
    return {
        "drafters": config.summary,
        "drafted_total": total.num_drafted,
        "accepted_total": total.num_accepted,
        "acceptance": total.num_accepted / total.num_drafted if total.num_drafted else None,
        "tokens_per_step": tokens_per_step(num_generated, total.num_accepted),
        "accepted_by_source": {
            source: counts.num_accepted for source, counts in drafts.by_source.items()
        },
    }


def requests_part(stats: EngineStats, recent: RecentRequests, facts: DashboardFacts) -> Part:
    return {
        "running": stats.load.num_running,
        "waiting": stats.load.num_waiting,
        "oldest_waiting_s": round(oldest_waiting_s(stats), 3),
        "finished_total": recent.num_finished,
        "failed_total": recent.num_failed,
        "rejected_total": recent.num_rejected,
        "max_running": facts.max_running,
        "max_waiting": facts.max_waiting,
    }


def latency_part(recent: RecentRequests) -> Part:
    return {
        "window_s": LATENCY_WINDOW_S,
        "ttft_ms": recent.first_tokens.look(),
        "tpot_ms": recent.next_tokens.look(),
    }


def kv_part(stats: EngineStats, recent: RecentRequests, page_size: int) -> Part:
    """Returns the state of the KV cache. `used`: pages of sequences; `cached`: pages in the prefix
    cache, in use or not. `store`: copies of pages on a disk or in shared memory. `prompt_tokens`:
    by where their keys and values came from. `window`: sequences with a `kv_window` that ended, and
    the pages that they gave back; None until there is one."""
    window = {
        "requests": recent.num_windowed,
        "dropped_pages": recent.num_dropped_tokens // page_size,
    }
    counts, tier = stats.counts, stats.tier
    queried, loaded = counts.num_queried_tokens, 0 if tier is None else tier.hit_tokens
    memory = {
        "name": "memory",
        "pages": stats.load.num_pages,
        "used": stats.load.num_used_pages,
        "cached": stats.load.num_cached_pages,
    }
    return {
        "page_tokens": page_size,
        "tiers": [memory],
        "store": None if tier is None else _store_part(tier),
        "prompt_tokens": {
            "prefix_cache": max(0, counts.num_hit_tokens - loaded),
            "store": loaded,
            "computed": counts.num_missed_tokens,
        },
        "prefix_hit_rate": counts.num_hit_tokens / queried if queried else None,
        "window": window if recent.num_windowed else None,
    }


def _store_part(tier: TierStats) -> Part:
    """Returns the tier's state. `memory`: the shared memory through which ranks use a disk."""
    return {
        "name": tier.name,
        "pages": tier.num_pages,
        "bytes": tier.num_bytes,
        "capacity_bytes": tier.capacity_bytes,
        "state": tier.state,
        "memory": None if tier.memory is None else _store_part(tier.memory),
    }


def experts_part(load: ExpertLoad | None, counts: ExpertCounts | None) -> Part | None:
    if load is None or counts is None:
        return None
    mean = counts.activated_mean
    return {
        "num_layers": load.num_layers,
        "layers": load.layers,
        "num_experts": load.num_experts,
        "top_k": load.top_k,
        "window_s": WINDOW_S,
        "num_tokens": counts.num_tokens,
        "num_steps": counts.num_steps,
        "load": counts.rows_LE.tolist(),
        "activated_mean": None if mean is None else [round(each, 3) for each in mean.tolist()],
    }


def memory_part(stats: EngineStats) -> Part | None:
    memory = stats.expert_memory
    if memory is None:
        return None
    return {
        "resident_bytes": memory.resident_bytes,
        "budget_bytes": memory.budget_bytes,
        "hit_rate": memory.hit_rate,
    }


def ranks_part(stats: EngineStats, shares: RankShares | None) -> list[Part]:
    """Returns the state of the ranks. `load` is an expert rank's share of rows, or an attention
    rank's share of sequences."""
    loads: dict[str, float] = {}
    if shares is not None and shares.shares is not None:
        loads = {f"expert-{rank}": share for rank, share in enumerate(shares.shares)}
    running = sum(rank.load.num_running for rank in stats.ranks)
    if running:
        loads |= {rank.name: rank.load.num_running / running for rank in stats.ranks}
    return [
        {
            "name": rank.name,
            "kind": rank.pool,
            "phase": rank.phase,
            "load": loads.get(rank.name),
            "busy": rank.busy_ratio,
            "restarts": rank.num_restarts,
        }
        for rank in stats.members
    ]


def placement_part(brief: PlacementBrief | None, shares: RankShares | None) -> Part | None:
    if brief is None:
        return None
    last = brief.last
    return {
        "version": brief.version,
        "balance": None if shares is None else shares.balance,
        "num_replicas": 0 if shares is None else shares.num_replicas,
        "age_s": round(brief.age_s, 1),
        "state": brief.state,
        "last_move": None if last is None else f"{last.outcome}: {last.text}",
    }


def predictor_part(stats: EngineStats, facts: PredictorFacts | None) -> Part | None:
    if facts is None or stats.batching is None:
        return None
    return {
        "kind": facts.kind,
        "recall": stats.batching.recall,
        "floor": facts.floor,
        "is_acting": facts.is_followed and bool(stats.batching.is_predictor_on),
    }
