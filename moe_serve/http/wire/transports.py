"""Transports that wrap those of asyncio, and limits of a connection that HTTP does not define.

One transport closes patiently, one writes without the GIL. `has_arrived` and `num_arrived` read
from the kernel how many written bytes have reached the client.

    head   the request line and headers: MAX_HEAD_BYTES, and HEAD_TIMEOUT_S from its first byte
           (on a new connection: from its start) to its last. Data that a parser has taken in one
           piece (at most 256 KiB) may be over before it is counted. The trailers of a chunked body
           have the same limit of bytes; they are read and dropped.
    write  a client must take almost all that is sent to it within WRITE_TIMEOUT_S, or in each such
           interval LEAST_TAKEN_BYTES of a large answer; otherwise the connection is aborted

The limits of bodies are in json_body.py. uvicorn closes connections that are idle between two
requests, also if the rest of the first body still arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios
import uuid
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from moe_serve.http.schema.api_error import ApiError

HEAD_TIMEOUT_S = 20.0
WRITE_TIMEOUT_S = 60.0
# the distance between the marks where a transport pauses and resumes writing
LEAST_TAKEN_BYTES = 48 * 1024
_LINGER_S = 2.0  # time of reading on after a refusal: closing at once could discard the answer


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
    """Returns the complete answer. An invalid request never reaches the ASGI application."""
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


_TCP_INFO_BYTES = 128
_BYTES_ACKED = 120  # offset in Linux' TCP_INFO
_FIRST_LOOK_S = 0.01
_LAST_LOOK_S = 1.0  # each check waits twice as long as the one before, up to this time


def has_arrived(transport: asyncio.Transport) -> bool:
    """Returns True if the client's machine has everything that was written; False if this is not
    known.

    Over HTTPS there may be bytes between TLS and the kernel while the kernel's buffer is full.
    """
    connected: socket.socket | None = transport.get_extra_info("socket")
    if connected is None:  # closed; the loop notifies its protocol in the next turn
        return False
    unsent = bytearray(4)
    with contextlib.suppress(OSError, ValueError):
        fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, unsent)
        return not any(unsent) and not transport.get_write_buffer_size()
    return False


def num_arrived(transport: asyncio.Transport) -> int:
    """Returns the bytes that the client's machine has taken since the connection was opened; 0 if
    unknown."""
    connected: socket.socket | None = transport.get_extra_info("socket")
    if connected is None or not hasattr(socket, "TCP_INFO"):
        return 0
    with contextlib.suppress(OSError, ValueError):
        # The socket object of uvloop's transports has a descriptor, but no options.
        with socket.socket(fileno=os.dup(connected.fileno())) as same:
            told = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(told) == _TCP_INFO_BYTES:
            return int(struct.unpack_from("=Q", told, _BYTES_ACKED)[0])
    return 0


class PatientTransport:
    """A TLS transport that closes only when the client has received all that was written.

    TLS gives a client 30 s from `close` to the end of its closing message and of the answer before
    it. The answer may take longer: it is written at once, whatever the client's speed, and data
    that is not yet encrypted is not counted.
    A client that takes less than LEAST_TAKEN_BYTES in `timeout_s` is disconnected.
    """

    def __init__(
        self, wrapped: asyncio.Transport, loop: asyncio.AbstractEventLoop, timeout_s: float
    ) -> None:
        self._wrapped, self._loop, self._timeout_s = wrapped, loop, timeout_s
        self._is_closing = False
        self._had_arrived = True  # at the last check
        # when the client's current interval began, which ends at the deadline
        self._num_arrived = 0
        self._deadline = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def is_closing(self) -> bool:
        return self._is_closing or self._wrapped.is_closing()

    def close(self) -> None:
        if self._wrapped.is_closing():
            self._wrapped.close()
        elif not self._is_closing:
            self._is_closing = True
            self._num_arrived = num_arrived(self._wrapped)
            self._deadline = self._loop.time() + self._timeout_s
            self._look(_FIRST_LOOK_S)

    def _look(self, pause_s: float) -> None:
        if self._wrapped.is_closing():
            return  # the connection is gone
        had_arrived, self._had_arrived = self._had_arrived, has_arrived(self._wrapped)
        # twice in a row: the kernel may only have had room for more
        if had_arrived and self._had_arrived:
            self._wrapped.close()
            return
        now, arrived = self._loop.time(), num_arrived(self._wrapped)
        if arrived - self._num_arrived >= LEAST_TAKEN_BYTES:
            self._num_arrived, self._deadline = arrived, now + self._timeout_s
        if now >= self._deadline:
            self._wrapped.abort()
            return
        self._loop.call_later(pause_s, self._look, min(2 * pause_s, _LAST_LOOK_S))


class DirectTransport:
    """A TCP transport that releases the GIL while the kernel takes the written data. Not for TLS.

    Writing to a socket is the longest part of sending a token; over loopback it includes the
    reader's share of the work. uvloop holds the GIL meanwhile, and the engine's thread waits.
    """

    def __init__(self, wrapped: asyncio.Transport) -> None:
        self._wrapped = wrapped
        self._descriptor: int = wrapped.get_extra_info("socket").fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def write(self, data: bytes) -> None:
        """Writes directly; the wrapped transport handles the rest, and any error.

        A closing transport may already have released its descriptor.
        """
        wrapped = self._wrapped
        if wrapped.is_closing() or wrapped.get_write_buffer_size():
            wrapped.write(data)
            return
        try:
            num_taken = os.write(self._descriptor, data)
        except OSError:  # full or broken: the transport will see the same
            num_taken = 0
        if num_taken < len(data):
            wrapped.write(data[num_taken:])
