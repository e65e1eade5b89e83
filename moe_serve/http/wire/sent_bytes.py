"""Reads from the kernel how many written bytes of a connection have arrived."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios

_TCP_INFO_BYTES = 128
_BYTES_ACKED = 120  # offset in Linux' TCP_INFO


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
