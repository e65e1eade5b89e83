"""The routes below /admin/placement: what is in force, re-balance now, apply a given plan."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from experts.placement.plan_file import parse_json, parse_placement, placement_text
from experts.placement.problem.placement import Placement
from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.errors import InvalidRequestError, RebalanceError
from moe_serve.http.gate.auth import ADMIN_PREFIX
from moe_serve.http.schema.body import read_json_bytes

_PLAN_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


def placement_router(placement: PlacementControl | None, max_body_bytes: int) -> APIRouter:
    """`placement` None: a server without expert ranks says so."""
    router = APIRouter(prefix=f"{ADMIN_PREFIX}/placement")

    def control() -> PlacementControl:
        if placement is None:
            raise RebalanceError(
                "Nothing can be moved: this server has no expert ranks (cluster.expert_ranks is 0)."
            )
        return placement

    @router.get("")
    async def status() -> dict[str, Any]:
        return asdict(await asyncio.to_thread(control().status))

    @router.get("/plan")
    async def plan() -> Response:
        return Response(placement_text(control().plan()), media_type="application/json")

    @router.post("/plan", openapi_extra=_PLAN_BODY)
    async def apply(request: Request) -> dict[str, Any]:
        found = control()
        target = await asyncio.to_thread(parse_plan, await read_json_bytes(request, max_body_bytes))
        return asdict(await asyncio.to_thread(found.apply, target))

    @router.post("/rebalance")
    async def rebalance() -> dict[str, Any]:
        return asdict(await asyncio.to_thread(control().rebalance))

    return router


def parse_plan(body: bytes) -> Placement:
    """Read a plan as `moe-serve place --out` writes it. Raises InvalidRequestError."""
    try:
        return parse_placement(parse_json(body.decode("utf-8")))
    except (ValueError, RecursionError) as error:  # PlacementError is a ValueError
        reason = str(error).rstrip(".")
        raise InvalidRequestError(
            f"The body is not a plan of moe-serve: {reason}; send a file that `moe-serve place "
            "--out` wrote.",
            param=None,
        ) from None
