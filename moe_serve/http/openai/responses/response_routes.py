"""The routes under /v1/responses: create a response, count its input, and read, delete and cancel
stored responses."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import Request, Response

from moe_serve.config.sections import ServerConfig
from moe_serve.errors import InvalidRequestError
from moe_serve.http.gate.auth import owner_of
from moe_serve.http.generation.chat_fields import own_ignored, renamed_fields
from moe_serve.http.generation.chat_generation import start_chat
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.prompts import render_prompt
from moe_serve.http.generation.requests import with_entitlement
from moe_serve.http.generation.respond import (
    SseResponse,
    SseStyle,
    request_body_schema,
    whole_response,
)
from moe_serve.http.openai.responses.input_items import new_id
from moe_serve.http.openai.responses.response_body import ResponsesBody
from moe_serve.http.openai.responses.response_chat import OWN_IGNORED, OWN_NAMES, translate
from moe_serve.http.openai.responses.response_run import ResponseRecord, ResponseRun
from moe_serve.http.openai.responses.response_store import (
    BackgroundRuns,
    ResponseKeeper,
    ResponseStore,
)
from moe_serve.http.schema.api_error import ApiError
from moe_serve.http.schema.field_types import parse_body
from moe_serve.http.schema.json_body import read_json_object
from moe_serve.http.schema.parameters import ignored_header
from moe_serve.http.wire.late_routes import LateRouter

_PREFIX = "/v1/responses"
_MAX_PAGE, _DEFAULT_PAGE = 100, 20


def stored_router(store: ResponseStore, runs: BackgroundRuns) -> LateRouter:
    router = LateRouter(prefix=_PREFIX)

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
                "Only a response with background: true can be cancelled. To end any other "
                "response, close its connection.",
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
    """Returns a page of `limit` items in `order` (desc: the last first), beginning after the item
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


def responses_router(server: ServerContext) -> LateRouter:
    router = LateRouter(prefix=_PREFIX)
    runs = BackgroundRuns()
    store = _store(server.config, runs)

    @router.post("", openapi_extra=request_body_schema(ResponsesBody))
    async def create_response(request: Request) -> Response:
        content = await read_json_object(request, server.config.max_body_bytes)
        body = parse_body(ResponsesBody, content)
        owner = owner_of(request)
        history = _conversation(store, body, owner)
        translated = translate(
            body, msgspec.json.decode(history), is_strict=server.config.is_strict
        )
        named = await server.model.named(body.model)
        with renamed_fields(OWN_NAMES):
            options = translated.options()
        options = with_entitlement(server, options, request.headers)
        options = replace(options, adapter=named.adapter)
        record = _record(named.name, body, options.entitlement.shown_tier)
        with renamed_fields(OWN_NAMES):
            unheeded = server.assistant.check(translated.chat, server.model)
            chat = await start_chat(server, translated.chat, options, record.id, splits_runs=True)
        of_chat = own_ignored([*unheeded, *chat.ignored], OWN_IGNORED)
        ignored = options.entitlement.unheeded([*translated.ignored, *of_chat])
        headers = {**ignored_header(ignored), **chat.headers}
        run = ResponseRun(record, chat, server.model.tokenizer)
        keeper = ResponseKeeper(store, owner, history[1:-1], translated.items)
        if body.background:
            return _json(runs.start(run, keeper), headers)
        if body.stream:
            return _stream(run, keeper, server.config.sse_ping_s, headers)
        return await whole_response(_whole(run, keeper), chat, request, headers)

    @router.post("/input_tokens", openapi_extra=request_body_schema(ResponsesBody))
    async def count_input_tokens(request: Request) -> Response:
        content = await read_json_object(request, server.config.max_body_bytes)
        body = parse_body(ResponsesBody, content)
        history = msgspec.json.decode(_conversation(store, body, owner_of(request)))
        translated = translate(body, history, is_strict=server.config.is_strict)
        server.model.check_name(body.model)
        with renamed_fields(OWN_NAMES):
            unheeded = server.assistant.check(translated.chat, server.model)
            prompt = await render_prompt(translated.chat, server.model)
        headers = ignored_header([*translated.ignored, *own_ignored(unheeded, OWN_IGNORED)])
        counted = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
        return _json(counted, headers)

    @router.post("/compact", include_in_schema=False)
    async def refuse_to_compact() -> Response:
        raise ApiError(
            404,
            "This server does not compact responses. Send fewer input items, or start without "
            "previous_response_id.",
            code="route_not_found",
        )

    router.routes += stored_router(store, runs).routes
    return router


def _record(name: str, body: ResponsesBody, tier: str | None) -> ResponseRecord:
    return ResponseRecord(
        id=new_id("resp"),
        created_at=int(time.time()),
        model=name,
        body=body,
        service_tier=tier or "default",
    )


def _store(config: ServerConfig, runs: BackgroundRuns) -> ResponseStore:
    return ResponseStore(
        max_entries=config.max_stored_responses,
        max_bytes=config.stored_responses_bytes,
        ttl_s=config.stored_response_ttl_s,
        on_loss=runs.end,
    )


def _conversation(store: ResponseStore, body: ResponsesBody, owner: str) -> bytes:
    """Returns the items before those of the request, as a JSON list."""
    if body.previous_response_id is None:
        return b"[]"
    entry = store.get(body.previous_response_id, owner, param="previous_response_id")
    if not entry.is_ended:
        raise ApiError(
            400,
            f"The response {entry.id!r} is still running. Wait for its end.",
            code="invalid_value",
            param="previous_response_id",
        )
    return entry.conversation


async def _whole(run: ResponseRun, keeper: ResponseKeeper) -> bytes:
    async for _ in run.events():
        continue
    _keep(run, keeper)
    return msgspec.json.encode(run.result)


def _stream(
    run: ResponseRun, keeper: ResponseKeeper, ping_s: float, headers: dict[str, str]
) -> SseResponse:
    async def events() -> AsyncIterator[bytes]:
        async for chunk in run.events():
            if run.result:
                _keep(run, keeper)  # before the client sees the end and may ask for it
            yield chunk

    style = SseStyle(write_error=run.failed_event, end=b"")
    return SseResponse(
        events(), ping_s=ping_s, on_close=run.chat.close, headers=headers, style=style
    )


def _keep(run: ResponseRun, keeper: ResponseKeeper) -> None:
    if run.record.body.is_stored:
        keeper.keep(run.result, is_new=True)


def _json(content: dict[str, Any], headers: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")
