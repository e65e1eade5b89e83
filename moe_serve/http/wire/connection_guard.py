"""Limits of one connection that HTTP does not define: sizes and times.

    head   the request line and headers: MAX_HEAD_BYTES, and HEAD_TIMEOUT_S from its first byte
           (on a new connection: from its start) to its last. Data that a parser has taken in one
           piece (at most 256 KiB) may be over before it is counted. The trailers of a chunked body
           have the same limit of bytes; they are read and dropped.
    write  a client must take almost all that is sent to it within WRITE_TIMEOUT_S, or in each such
           interval LEAST_TAKEN_BYTES of a large answer; otherwise the connection is aborted

The limits of bodies are in body.py. uvicorn closes connections that are idle between two requests,
also if the rest of the first body still arrives.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from http import HTTPStatus

from moe_serve.http.schema.errors import ApiError

HEAD_TIMEOUT_S = 20.0
WRITE_TIMEOUT_S = 60.0
# the distance between the marks where a transport pauses and resumes writing
LEAST_TAKEN_BYTES = 48 * 1024
_LINGER_S = 2.0  # keeps reading after a refusal: closing at once could discard the answer


class ConnectionGuard:
    """The timers of one connection, and the refusal that ends it.

    The protocol reports when a head begins and ends and when writing stalls and resumes. It
    discards received data once `is_refused` is set. `on_late_head` is called when a head has not
    ended in time.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_late_head: Callable[[], None],
        *,
        head_timeout_s: float,
        write_timeout_s: float,
    ) -> None:
        self.is_refused = False
        self._loop = loop
        self._on_late_head = on_late_head
        self._head_timeout_s = head_timeout_s
        self._write_timeout_s = write_timeout_s
        self._transport: asyncio.Transport | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def open(self, transport: asyncio.Transport) -> None:
        """A new connection: the timer of its first head starts."""
        self._transport = transport
        self.begin_head()

    def begin_head(self) -> None:
        """Starts the timer of a head. It has no effect while one runs."""
        if self._head_timer is None and not self.is_refused:
            self._head_timer = self._loop.call_later(self._head_timeout_s, self._head_is_late)

    def end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def stall_writing(self) -> None:
        if self._write_timer is None and self._transport is not None:
            self._await_reader(self._transport)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def close(self) -> None:
        """The connection has been closed."""
        self.end_head()
        self.resume_writing()
        self._transport = None

    def refuse(self, error: ApiError, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Answers with the error. The connection then accepts no more data and closes soon."""
        transport = self._transport
        if transport is None or transport.is_closing() or self.is_refused:
            return
        self.is_refused = True
        self.end_head()
        transport.write(_response_bytes(error, headers))
        if transport.can_write_eof():
            transport.write_eof()
            self._loop.call_later(_LINGER_S, transport.close)
        else:
            transport.close()

    def _await_reader(self, transport: asyncio.Transport) -> None:
        most = transport.get_write_buffer_size() - LEAST_TAKEN_BYTES
        self._write_timer = self._loop.call_later(
            self._write_timeout_s, self._look_at_reader, transport, most
        )

    def _look_at_reader(self, transport: asyncio.Transport, most: int) -> None:
        self._write_timer = None
        if transport.get_write_buffer_size() > most:
            transport.abort()  # close would wait for data that the client does not read
        else:
            self._await_reader(transport)

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._on_late_head()


def late_head_error() -> ApiError:
    message = "The request's headers did not arrive within the time limit."
    return ApiError(408, message, code="request_timeout")


def _response_bytes(error: ApiError, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The complete answer. An invalid request never reaches the ASGI application."""
    body = error.body()
    lines = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
    lines += [name + b": " + value for name, value in headers]
    lines += [
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"x-request-id: req-" + uuid.uuid4().hex.encode(),
        b"connection: close",
    ]
    return b"\r\n".join([*lines, b"", body])
