"""The admin routes of cells. They need an admin key.

GET /admin/cells, POST /admin/cells/{index}/drain and /admin/cells/{index}/undrain
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.watch.cells_control import CellsControl
from moe_serve.errors import CellsError
from moe_serve.http.dashboard.cells_part import cells_part
from moe_serve.http.gate.auth import ADMIN_PREFIX


def cells_router(cells: CellsControl | None, engine: EngineClient) -> APIRouter:
    """`cells` None: the server has one cell, and the routes answer with an error."""
    router = APIRouter(prefix=f"{ADMIN_PREFIX}/cells")

    def control() -> CellsControl:
        if cells is None:
            raise CellsError("This server has a single cell: start it with --cells to have more.")
        return cells

    def listed() -> dict[str, Any]:
        return {"cells": cells_part(engine.stats())}

    @router.get("")
    async def show() -> dict[str, Any]:
        control()
        return listed()

    @router.post("/{index:int}/drain")
    async def drain(index: int) -> dict[str, Any]:
        control().drain(index, is_draining=True)
        return listed()

    @router.post("/{index:int}/undrain")
    async def undrain(index: int) -> dict[str, Any]:
        control().drain(index, is_draining=False)
        return listed()

    return router
