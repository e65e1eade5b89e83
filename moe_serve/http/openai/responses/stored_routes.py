"""GET, DELETE and cancel of stored responses, and their input in pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from moe_serve.errors import InvalidRequestError
from moe_serve.http.gate.auth import owner_of
from moe_serve.http.openai.responses.background import BackgroundRuns
from moe_serve.http.openai.responses.store import ResponseStore
from moe_serve.http.schema.errors import ApiError

_MAX_PAGE, _DEFAULT_PAGE = 100, 20


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


def item_page(items: bytes, query: Mapping[str, str]) -> dict[str, Any]:
    """A page of `limit` items in `order` (desc: the last first), beginning after the item
    `after`."""
    everything: list[dict[str, Any]] = msgspec.json.decode(b"[" + items + b"]")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, got {order[:20]!r}.", param="order")
    limit = query.get("limit", str(_DEFAULT_PAGE))
    is_number = limit.isascii() and limit.isdecimal() and len(limit) <= 3
    if not (is_number and 1 <= int(limit) <= _MAX_PAGE):
        raise InvalidRequestError(
            f"limit must be an integer from 1 to {_MAX_PAGE}, got {limit[:20]!r}.", param="limit"
        )
    if order == "desc":
        everything.reverse()
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in everything]
        if after not in ids:
            raise InvalidRequestError(
                f"after: this request has no item {after[:80]!r}.", param="after"
            )
        everything = everything[ids.index(after) + 1 :]
    page = everything[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(everything) > len(page),
    }
