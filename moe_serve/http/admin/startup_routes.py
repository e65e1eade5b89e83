"""GET /startup returns the phases of the server's start and the memory plan."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from moe_serve.engine.memory.memory_plan import MemoryPlan
from moe_serve.engine.watch.startup import Startup


def startup_router(startup: Startup) -> APIRouter:
    router = APIRouter()

    @router.get("/startup")
    async def show() -> dict[str, Any]:
        return startup_json(startup)

    return router


def startup_json(startup: Startup) -> dict[str, Any]:
    """The start as JSON. `phase` is the current one; `memory` is null until it is planned."""
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
