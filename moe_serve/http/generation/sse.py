"""Server-sent events: streams bytes until the source or the client ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe_serve.http.schema.errors import ApiError, to_api_error
from moe_serve.http.wire.body_writer import BodyWriter, body_writer_of
from moe_serve.http.wire.disconnect import cancel_all, wait_for_disconnect

_LOGGER = logging.getLogger(__name__)
DONE_EVENT = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def sse_event(json_bytes: bytes) -> bytes:
    return b"data: " + json_bytes + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return sse_event(error.body())


@dataclass(frozen=True, slots=True, kw_only=True)
class SseStyle:
    """The parts of an API's stream beside its events. The defaults are those of OpenAI's chat."""

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
