"""GET, DELETE and cancel of stored responses."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from moe_serve.http.gate.auth import owner_of
from moe_serve.http.openai.responses.background import BackgroundRuns
from moe_serve.http.openai.responses.item_pages import item_page
from moe_serve.http.openai.responses.store import ResponseStore
from moe_serve.http.schema.errors import ApiError


def stored_router(store: ResponseStore, runs: BackgroundRuns) -> APIRouter:
    router = APIRouter()

    @router.get("/{response_id}")
    async def get_response(response_id: str, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() == "true":
            raise ApiError(
                400,
                "The events of a response can only be streamed while it is created, not "
                "afterwards.",
                code="unsupported_parameter",
                param="stream",
            )
        return _stored(store, response_id, request)

    @router.delete("/{response_id}")
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        store.delete(response_id, owner_of(request))
        await runs.cancel(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/{response_id}/cancel")
    async def cancel_response(response_id: str, request: Request) -> Response:
        found = msgspec.json.decode(store.get(response_id, owner_of(request)).response)
        if not found["background"]:
            raise ApiError(
                400,
                "Only a response with background: true can be cancelled. To end another, close "
                "its connection.",
                code="not_cancellable",
            )
        await runs.cancel(response_id)
        return _stored(store, response_id, request)

    @router.get("/{response_id}/input_items")
    async def list_input_items(response_id: str, request: Request) -> Response:
        entry = store.get(response_id, owner_of(request))
        page = msgspec.json.encode(item_page(entry.items, request.query_params))
        return Response(page, media_type="application/json")

    return router


def _stored(store: ResponseStore, response_id: str, request: Request) -> Response:
    entry = store.get(response_id, owner_of(request))
    return Response(entry.response, media_type="application/json")
