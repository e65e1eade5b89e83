"""Sends an answer, complete or as server-sent events. The generation routes share it."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from pydantic import TypeAdapter
from starlette.types import Receive, Scope, Send

from moe_serve.http.generation.logprob_format import MAX_INLINE_LOGPROBS
from moe_serve.http.generation.usage import Usage
from moe_serve.http.schema.api_error import ApiError, to_api_error
from moe_serve.http.wire.body_writer import BodyWriter, body_writer_of

T = TypeVar("T")


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected. Call it only after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def run_until_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Returns the result of `work`, or None (with `work` cancelled) if the client disconnects
    first."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await cancel_all(working, watching)


async def cancel_all(*tasks: asyncio.Task[Any]) -> None:
    """Cancels the tasks and waits until they have ended, whatever their results."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_LOGGER = logging.getLogger(__name__)
DONE_EVENT = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def sse_event(json_bytes: bytes) -> bytes:
    return b"data: " + json_bytes + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return sse_event(error.body())


@dataclass(frozen=True, slots=True, kw_only=True)
class SseStyle:
    """The parts of an API's stream that are not its events. The defaults are those of OpenAI's
    chat.
    """

    write_error: Callable[[ApiError], bytes] = error_event
    end: bytes = DONE_EVENT
    ping: bytes = PING


_CHAT_STYLE = SseStyle()


class SseResponse(Response):
    """Sends `events`, a ping when they pause, an error event if they fail, and [DONE].

    `on_close` runs exactly once, however the response ends, and aborts the generation in the
    engine. It runs before the tasks are awaited, so that a second cancellation cannot skip it.
    FastAPI's EventSourceResponse builds a pydantic object for every event, which costs more than
    the rest of the work for a token. Here an event is bytes that the caller has formatted.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        ping_s: float,
        on_close: Callable[[], None],
        headers: Mapping[str, str],
        style: SseStyle = _CHAT_STYLE,
    ) -> None:
        self.status_code = 200
        self._style = style
        self.background = None
        self.init_headers({**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._ping_s = ping_s
        self._on_close = on_close
        self._num_sent = 0
        self._sending = asyncio.Lock()  # events and pings come from two tasks
        self._is_ended = False
        self._writer: BodyWriter | None = None  # set once the answer has begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streaming = asyncio.create_task(self._stream(scope, send))
        watching = asyncio.create_task(wait_for_disconnect(receive))
        tasks = {streaming, watching}
        first = asyncio.FIRST_COMPLETED
        try:
            while True:
                num_sent = self._num_sent
                done, _ = await asyncio.wait(tasks, timeout=self._ping_s, return_when=first)
                if done:
                    break
                # Nothing was sent for a whole interval, and no send waits for a slow reader.
                if self._num_sent == num_sent and not self._sending.locked():
                    await self._send(send, self._style.ping)
            if streaming.done():
                streaming.result()
        finally:
            self._on_close()
            await cancel_all(streaming, watching)

    async def _stream(self, scope: Scope, send: Send) -> None:
        async with self._sending:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
        self._writer = body_writer_of(scope)
        try:
            async for chunk in self._events:
                if self.takes_now:
                    self.write_now(chunk)
                elif chunk:
                    await self._send(send, chunk)
        # the status line is already sent: the stream is the only place left
        except Exception as error:
            api_error = to_api_error(error)
            if api_error.code == "internal_error":
                _LOGGER.exception("a stream failed")
            await self._send(send, self._style.write_error(api_error))
        if self._style.end:
            await self._send(send, self._style.end)
        await self._send(send, b"", is_end=True)

    @property
    def takes_now(self) -> bool:
        """True if `write_now` may be called: the connection has no backlog."""
        return self._writer is not None and self._writer.is_open and not self._sending.locked()

    def write_now(self, chunk: bytes) -> None:
        """Sends events outside of the iterator `events`."""
        if self._writer is not None and chunk:
            self._num_sent += 1
            self._writer.write(chunk)

    async def _send(self, send: Send, chunk: bytes, *, is_end: bool = False) -> None:
        async with self._sending:
            if self._is_ended:  # a ping that came too late
                return
            self._num_sent += 1
            self._is_ended = is_end
            await send({"type": "http.response.body", "body": chunk, "more_body": not is_end})


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
    """Returns True if the pieces hold so many logprobs that a thread must write them."""
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
    """Returns the request schema for openapi.json. FastAPI does not know it, as the routes parse
    the body.

    `schema`: a pydantic model, or a union of several.
    """
    content = {"application/json": {"schema": _json_schema(schema)}}
    return {"requestBody": {"required": True, "content": content}}


@functools.cache
def _json_schema(schema: Any) -> dict[str, Any]:
    """Returns the JSON schema, one object for all routes with the same body: it is only read."""
    return TypeAdapter[Any](schema).json_schema()
