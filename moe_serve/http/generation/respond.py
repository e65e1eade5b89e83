"""Sends an answer, streamed or complete. The generation routes share it."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from pydantic import TypeAdapter

from moe_serve.http.generation.logprob_format import MAX_INLINE_LOGPROBS
from moe_serve.http.generation.sse import SseResponse
from moe_serve.http.generation.usage import Usage
from moe_serve.http.wire.disconnect import run_until_disconnect

_CLIENT_CLOSED_REQUEST = 499


class Countable(Protocol):
    """A piece of an answer that can tell its size."""

    @property
    def num_logprobs(self) -> int: ...


AnyPiece = TypeVar("AnyPiece", bound=Countable)
Written = TypeVar("Written", bound=Countable, contravariant=True)
Made = TypeVar("Made", bound=Countable, covariant=True)


class PieceStream(Protocol[Made]):
    """A source of pieces: a Generation or a ChatGeneration."""

    def __aiter__(self) -> AsyncIterator[Sequence[Made]]: ...

    @property
    def is_ended(self) -> bool: ...

    def take(self) -> Sequence[Made]: ...

    def listen(self, on_step: Callable[[], bool]) -> None: ...

    def usage(self) -> Usage: ...

    def close(self) -> None: ...


class StreamFormat(Protocol[Written]):
    """Writes the events of a stream."""

    def events(self, piece: Written) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...


def stream_response(
    generation: PieceStream[AnyPiece],
    formatter: StreamFormat[AnyPiece],
    *,
    has_usage: bool,
    ping_s: float,
    headers: Mapping[str, str],
) -> SseResponse:
    """Sends the generation as server-sent events and closes it when the response ends."""

    async def events() -> AsyncIterator[bytes]:
        async for pieces in generation:
            if _is_long(pieces):
                yield await asyncio.to_thread(_written_events, formatter, pieces)
            else:
                yield _written_events(formatter, pieces)
        if has_usage:
            yield formatter.usage(generation.usage())

    def write_step() -> bool:
        """Writes one step as `events` does, if that needs no waiting."""
        if not response.takes_now:
            return False
        response.write_now(_written_events(formatter, generation.take()))
        return not generation.is_ended

    response = SseResponse(events(), ping_s=ping_s, on_close=generation.close, headers=headers)
    generation.listen(write_step)
    return response


def _written_events(formatter: StreamFormat[AnyPiece], pieces: Sequence[AnyPiece]) -> bytes:
    return b"".join([formatter.events(piece) for piece in pieces])


def _is_long(pieces: Sequence[Countable]) -> bool:
    """True if the pieces hold so many logprobs that a thread must write them."""
    count = 0
    for piece in pieces:
        count += piece.num_logprobs
    return count > MAX_INLINE_LOGPROBS


async def whole_response(
    answer: Coroutine[Any, Any, bytes],
    generation: PieceStream[Countable],
    request: Request,
    headers: Mapping[str, str],
) -> Response:
    """Sends the answer in one piece. If the client disconnects meanwhile, the generation ends."""
    try:
        body = await run_until_disconnect(answer, request.receive)
    finally:
        generation.close()
    if body is None:  # the client is gone
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    return Response(body, headers=dict(headers), media_type="application/json")


def request_body_schema(schema: Any) -> dict[str, Any]:
    """The request schema for openapi.json. FastAPI does not know it, as the routes parse the body.

    `schema`: a pydantic model, or a union of several.
    """
    content = {"application/json": {"schema": json.loads(_json_schema(schema))}}
    return {"requestBody": {"required": True, "content": content}}


@functools.cache
def _json_schema(schema: Any) -> str:
    """The JSON schema as text. Routes with the same body each get a copy, which FastAPI may
    change."""
    return json.dumps(TypeAdapter[Any](schema).json_schema())
