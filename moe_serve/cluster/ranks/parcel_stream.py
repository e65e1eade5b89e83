"""Moves many bytes over a socket with few waits, each bounded by a deadline.

A socket with a time-out of Python's wakes this process for every few bytes. Here the kernel waits
for all of them.
"""

from __future__ import annotations

import math
import socket
import struct
import time

_TIMEVAL = struct.Struct("ll")


def receive_all(connection: socket.socket, view: memoryview, deadline: float) -> None:
    """Receives exactly as many bytes as the view has. Raises OSError."""
    while view:
        _limit(connection, socket.SO_RCVTIMEO, deadline)
        try:
            count = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        except BlockingIOError:
            continue  # the deadline has passed
        if not count:
            raise ConnectionError("the other end closed it")
        view = view[count:]


def send_all(connection: socket.socket, view: memoryview, deadline: float) -> None:
    """Sends all bytes of a view. Raises OSError."""
    while view:
        _limit(connection, socket.SO_SNDTIMEO, deadline)
        try:
            view = view[connection.send(view) :]
        except BlockingIOError:
            continue  # the deadline has passed


def forget_deadline(connection: socket.socket) -> None:
    """Lets the next receive wait for as long as the connection lives."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, 0))


def _limit(connection: socket.socket, option: int, deadline: float) -> None:
    """Sets the time after which the kernel gives up a wait."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("it was too slow")
    connection.settimeout(None)
    fraction, seconds = math.modf(remaining_s)
    limit = _TIMEVAL.pack(int(seconds), max(1, int(fraction * 1e6)))
    connection.setsockopt(socket.SOL_SOCKET, option, limit)
