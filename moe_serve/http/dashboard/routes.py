"""GET /dashboard/state."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from moe_serve.errors import InvalidRequestError
from moe_serve.http.dashboard.board import Board

_MAX_DIGITS = 18


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
