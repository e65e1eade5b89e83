"""GET /admin/placement and /admin/placement/plan, POST /admin/placement/rebalance.

They need an admin key.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response

from experts.placement.plan_file import placement_text
from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.errors import RebalanceError
from moe_serve.http.gate.auth import ADMIN_PREFIX


def placement_router(placement: PlacementControl | None) -> APIRouter:
    """`placement` None: the server has no expert ranks, and the routes answer with an error."""
    router = APIRouter(prefix=f"{ADMIN_PREFIX}/placement")

    def control() -> PlacementControl:
        if placement is None:
            raise RebalanceError(
                "This server has no expert ranks, so no experts can be moved "
                "(cluster.expert_ranks is 0)."
            )
        return placement

    @router.get("")
    async def status() -> dict[str, Any]:
        return asdict(await asyncio.to_thread(control().status))

    @router.get("/plan")
    async def plan() -> Response:
        return Response(placement_text(control().plan()), media_type="application/json")

    @router.post("/rebalance")
    async def rebalance() -> dict[str, Any]:
        return asdict(await asyncio.to_thread(control().rebalance))

    return router
