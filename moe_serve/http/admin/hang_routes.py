"""GET /admin/hang returns the hang report of this moment. It needs an admin key."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from moe_serve.engine.watch.hang_watch import HangWatch
from moe_serve.http.gate.auth import ADMIN_PREFIX


def hang_router(hangs: HangWatch) -> APIRouter:
    router = APIRouter(prefix=ADMIN_PREFIX)

    @router.get("/hang", response_class=Response)
    async def report() -> Response:
        text = await asyncio.to_thread(hangs.report)
        return Response(text, media_type="text/plain; charset=utf-8")

    return router
