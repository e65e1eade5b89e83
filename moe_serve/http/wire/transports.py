"""Transports around those of asyncio: one that closes patiently, one that writes without the GIL.

`has_arrived` and `num_arrived` read from the kernel how many written bytes have reached the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios
from typing import Any

from moe_serve.http.wire.connection_guard import LEAST_TAKEN_BYTES

_TCP_INFO_BYTES = 128
_BYTES_ACKED = 120  # offset in Linux' TCP_INFO
_FIRST_LOOK_S = 0.01
_LAST_LOOK_S = 1.0  # each check waits twice as long as the one before, up to this time


def has_arrived(transport: asyncio.Transport) -> bool:
    """True if the client's machine has everything that was written; False if this is not known.

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
    """Bytes that the client's machine has taken since the connection was opened; 0 if unknown."""
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
