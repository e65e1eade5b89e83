"""The admin routes for recording routing traces and for the placement. They need an admin key.

POST /admin/trace/start and /admin/trace/stop, GET /admin/trace/status
GET /admin/placement and /admin/placement/plan, POST /admin/placement/plan and /rebalance, all with
?cell=N if the server has several cells
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import Request, Response

from experts.placement.plan_file import parse_json, parse_placement, placement_text
from experts.placement.problem.placement import Placement
from moe_serve.engine.routes.cell_placements import AnyPlacement, CellPlacements
from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.engine.tracing import MIN_RATE, Tracing, TracingStatus
from moe_serve.errors import CellsError, InvalidRequestError, RebalanceError
from moe_serve.http.gate.auth import ADMIN_PREFIX
from moe_serve.http.schema.json_body import read_json_bytes, read_json_object
from moe_serve.http.wire.late_routes import LateRouter

_MAX_DIGITS = 10  # longest accepted cell number
_FIELDS = ("sample_rate", "weights")
_START_SCHEMA = {
    "type": "object",
    "properties": {
        "sample_rate": {"type": ["number", "null"], "minimum": MIN_RATE, "maximum": 1},
        "weights": {"type": ["boolean", "null"]},
    },
    "additionalProperties": False,
}
_START_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _START_SCHEMA}}}
}


_PLAN_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


def trace_router(tracing: Tracing, max_body_bytes: int) -> LateRouter:
    router = LateRouter(prefix=f"{ADMIN_PREFIX}/trace")

    @router.post("/start", openapi_extra=_START_BODY)
    async def start(request: Request) -> dict[str, Any]:
        body = await read_json_object(request, max_body_bytes)
        rate, has_weights = _options(body)
        return as_json(await asyncio.to_thread(tracing.start, rate, has_weights))

    @router.post("/stop")
    async def stop() -> dict[str, Any]:
        return as_json(await asyncio.to_thread(tracing.stop))

    @router.get("/status")
    async def status() -> dict[str, Any]:
        return as_json(tracing.status())

    return router


def as_json(status: TracingStatus) -> dict[str, Any]:
    return asdict(status)


def _options(body: dict[str, Any]) -> tuple[float | None, bool | None]:
    unknown = sorted(body.keys() - set(_FIELDS))
    if unknown:
        raise InvalidRequestError(
            f"Unknown field {unknown[0]!r}. The known fields are {', '.join(_FIELDS)}.",
            param=unknown[0],
        )
    rate, has_weights = body.get("sample_rate"), body.get("weights")
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float)):
        raise InvalidRequestError(
            f"sample_rate must be a number, got {rate!r}.", param="sample_rate"
        )
    if rate is not None and not MIN_RATE <= rate <= 1:
        raise InvalidRequestError(
            f"sample_rate must be in [{MIN_RATE:g}, 1], got {rate!r}.", param="sample_rate"
        )
    if has_weights is not None and not isinstance(has_weights, bool):
        raise InvalidRequestError(
            f"weights must be true or false, got {has_weights!r}.", param="weights"
        )
    return rate, has_weights


def placement_router(placement: AnyPlacement | None, max_body_bytes: int) -> LateRouter:
    """Returns the routes. With `placement` None the server has no expert ranks, and they answer
    with an error.
    """
    router = LateRouter(prefix=f"{ADMIN_PREFIX}/placement")

    @router.get("")
    async def status(cell: str | None = None) -> dict[str, Any]:
        if cell is None and isinstance(placement, CellPlacements):
            return {"cells": await asyncio.to_thread(_of_all_cells, placement)}
        return asdict(await asyncio.to_thread(_control(placement, cell).status))

    @router.get("/plan")
    async def plan(cell: str | None = None) -> Response:
        text = placement_text(_control(placement, cell).plan())
        return Response(text, media_type="application/json")

    @router.post("/plan", openapi_extra=_PLAN_BODY)
    async def apply(request: Request, cell: str | None = None) -> dict[str, Any]:
        found = _control(placement, cell)
        target = await asyncio.to_thread(parse_plan, await read_json_bytes(request, max_body_bytes))
        return asdict(await asyncio.to_thread(found.apply, target))

    @router.post("/rebalance")
    async def rebalance(cell: str | None = None) -> dict[str, Any]:
        return asdict(await asyncio.to_thread(_control(placement, cell).rebalance))

    return router


def _control(placement: AnyPlacement | None, cell: str | None) -> PlacementControl:
    """Returns the control of the cell with this number, or with `cell` None that of the only cell.
    Raises RebalanceError, CellsError and InvalidRequestError.
    """
    if placement is None:
        raise RebalanceError(
            "This server has no expert ranks, so no experts can be moved (cluster.expert_ranks is "
            "0)."
        )
    if isinstance(placement, CellPlacements):
        if cell is None:
            raise InvalidRequestError(
                "Each cell has a placement of its own: name one by ?cell=N; this server has "
                f"{placement.names}.",
                param="cell",
            )
        if not (cell.isascii() and cell.isdigit() and len(cell) < _MAX_DIGITS):
            raise InvalidRequestError(
                f"cell must be the number of a cell, got {cell[:100]!r}; this server has "
                f"{placement.names}.",
                param="cell",
            )
        return placement.of(int(cell))
    if cell is not None:
        raise CellsError("This server has a single cell: leave out ?cell.")
    return placement


def _of_all_cells(placements: CellPlacements) -> list[dict[str, Any]]:
    controls = placements.by_cell.items()
    return [{"cell": cell, **asdict(control.status())} for cell, control in controls]


def parse_plan(body: bytes) -> Placement:
    """Reads a plan as `moe-serve place --out` writes it. Raises InvalidRequestError."""
    try:
        return parse_placement(parse_json(body.decode("utf-8")))
    except (ValueError, RecursionError) as error:  # PlacementError is a ValueError
        reason = str(error).rstrip(".")
        raise InvalidRequestError(
            f"The body is not a plan of moe-serve: {reason}; send a file that `moe-serve place "
            "--out` wrote.",
            param=None,
        ) from None
