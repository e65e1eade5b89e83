"""The admin routes of cells. They need an admin key.

GET /admin/cells lists them with their states. POST /admin/cells {"shape": "1A1E decode"} and DELETE
/admin/cells/{index} add and remove one: they answer at once, with 202, and the list shows the
progress. POST /admin/cells/{index}/drain and /undrain, and POST /admin/ranks/{name}/drain and
/undrain, control which cells and ranks take requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import Request

from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.watch.cells_control import CellPlace, CellsControl
from moe_serve.errors import CellsError, ConfigError, InvalidRequestError
from moe_serve.http.dashboard.cells_part import cells_part, scaling_part
from moe_serve.http.gate.auth import ADMIN_PREFIX
from moe_serve.http.schema.json_body import read_json_object
from moe_serve.http.wire.late_routes import LateRouter

_FIELDS = ("shape", "number", "by_hand", "node")
_SCHEMA = {
    "type": "object",
    "properties": {
        "shape": {"type": "string"},
        "number": {"type": ["integer", "null"], "minimum": 0},
        "by_hand": {"type": ["boolean", "null"]},
        "node": {"type": ["string", "null"]},
    },
    "required": ["shape"],
    "additionalProperties": False,
}
_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}}


def cells_router(cells: CellsControl | None, engine: EngineClient, max_bytes: int) -> LateRouter:
    """Returns the routes. On a server with one cell, `cells` is None, and they answer an error."""
    router = LateRouter(prefix=ADMIN_PREFIX)

    def control() -> CellsControl:
        if cells is None:
            raise CellsError(
                "This server has a single cell. Start it with several cells in --cells, or with "
                "one cell and cells.can_grow = true."
            )
        return cells

    def listed(index: int | None = None) -> dict[str, Any]:
        """Returns all cells and, by itself, one of them. Of a cell that has gone, only the state is
        known."""
        stats = engine.stats()
        found = cells_part(stats, has_commands=True)
        nodes = [asdict(node) for node in control().nodes()]
        for cell in found:
            cell["nodes"] = [node["name"] for node in nodes if cell["name"] in node["cells"]]
        shown = {"cells": found, "autoscale": scaling_part(stats), "nodes": nodes}
        if index is None:
            return shown
        gone = {"name": f"cell-{index}", "state": "gone"}
        one = next((cell for cell in found if cell["name"] == gone["name"]), gone)
        return {"cell": one, **shown}

    @router.get("/cells")
    async def show() -> dict[str, Any]:
        control()
        return listed()

    @router.post("/cells", status_code=202, openapi_extra=_BODY)
    async def add(request: Request) -> dict[str, Any]:
        found = control()
        shape, number, place = _values(await read_json_object(request, max_bytes))
        try:
            add_cell = found.add_cell  # may read the model's config to plan the memory
            index = await asyncio.to_thread(add_cell, shape, number=number, place=place)
        except ConfigError as error:
            raise InvalidRequestError(str(error), param="shape") from None
        return listed(index)

    @router.delete("/cells/{index:int}", status_code=202)
    async def remove(index: int) -> dict[str, Any]:
        control().remove_cell(index)
        return listed(index)

    @router.post("/cells/{index:int}/drain")
    async def drain(index: int) -> dict[str, Any]:
        control().drain(index, is_draining=True)
        return listed(index)

    @router.post("/cells/{index:int}/undrain")
    async def undrain(index: int) -> dict[str, Any]:
        control().drain(index, is_draining=False)
        return listed(index)

    _add_rank_routes(router, control, listed)
    return router


def _add_rank_routes(
    router: LateRouter, control: Callable[[], CellsControl], listed: Callable[[], dict[str, Any]]
) -> None:
    @router.post("/ranks/{name:path}/drain")
    async def drain_rank(name: str) -> dict[str, Any]:
        control().drain_rank(name, is_draining=True)
        return listed()

    @router.post("/ranks/{name:path}/undrain")
    async def undrain_rank(name: str) -> dict[str, Any]:
        control().drain_rank(name, is_draining=False)
        return listed()


def _values(body: dict[str, Any]) -> tuple[str, int | None, CellPlace]:
    unknown = sorted(body.keys() - set(_FIELDS))
    if unknown:
        raise InvalidRequestError(
            f"Unknown field {unknown[0][:100]!r}. The known fields are {', '.join(_FIELDS)}.",
            param=unknown[0][:100],
        )
    shape, number, by_hand, node = (body.get(field) for field in _FIELDS)
    if not isinstance(shape, str):
        raise InvalidRequestError(
            f"shape must be a string such as '1A1E decode', got {shape!r:.100}.", param="shape"
        )
    is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 0
    if number is not None and not is_number:
        raise InvalidRequestError(
            f"number must be an integer of 0 or more, got {number!r:.100}.", param="number"
        )
    if by_hand is not None and not isinstance(by_hand, bool):
        raise InvalidRequestError(
            f"by_hand must be true or false, got {by_hand!r:.100}.", param="by_hand"
        )
    if node is not None and not isinstance(node, str):
        raise InvalidRequestError(
            f"node must be the name of a node, got {node!r:.100}.", param="node"
        )
    return shape, number, CellPlace(by_hand=bool(by_hand), node=node)
