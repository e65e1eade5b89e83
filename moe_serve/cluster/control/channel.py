"""A control connection: typed messages, both ways, over an authenticated TCP socket.

The channel does not know what the messages mean. It is created with the msgspec decoder of the
tagged union that it receives, and sends any struct.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from typing import Generic, NoReturn, TypeVar

import msgspec

from moe_serve.cluster.control.byte_stream import (
    MAX_FRAME_BYTES,
    BrokenStreamError,
    FrameReader,
    HandshakeError,
    connect_handshake,
    frame,
)
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.errors import ChannelClosedError, ClusterError

SEND_TIMEOUT_S = 5.0
_RECEIVE_BYTES = 256 * 1024
_ATTEMPT_S = 5.0  # one attempt to connect, handshake included
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 0.5
# With these options both ends notice a cut cable or a dead host by themselves, with or without data
# on its way. Without them TCP retries for a quarter of an hour.
UNREACHED_S = 10
_LIVENESS = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": UNREACHED_S * 1000,
}

M = TypeVar("M")


class Channel(Generic[M]):
    """Sends and receives messages over a connected socket, which it owns after the handshake.

    M is the type of the messages it receives. Any thread may send, and any may close. A frame that
    holds no message of the union is counted in `num_malformed` and dropped. A stream that no longer
    holds frames closes the channel.
    """

    def __init__(
        self,
        connection: socket.socket,
        decoder: msgspec.msgpack.Decoder[M],
        *,
        send_timeout_s: float = SEND_TIMEOUT_S,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        connection.setblocking(False)
        set_options(connection)
        self._socket = connection
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._send_timeout_s = send_timeout_s
        self._frames = FrameReader(max_frame_bytes)
        self._received: deque[M] = deque()
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._reason: str | None = None  # why the channel is closed
        self._is_broken = False  # the stream no longer holds frames
        self.num_malformed = 0
        self.peer = _address(connection)

    @property
    def is_closed(self) -> bool:
        return self._reason is not None

    @property
    def local_host(self) -> str:
        """Returns the address of this end: the interface through which the peer is reached."""
        return str(self._socket.getsockname()[0])

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message; returns when the kernel has all of it. Raises ChannelClosedError.

        A peer that does not read for `send_timeout_s` is given up. Half a frame may have been sent
        by then, so the channel cannot be used again.
        """
        view = memoryview(frame(self._encoder.encode(message)))
        with self._send_lock:
            deadline = time.monotonic() + self._send_timeout_s
            while view:
                self._check_open()
                try:
                    view = view[self._socket.send(view) :]
                except BlockingIOError:
                    if not self._wait(select.POLLOUT, deadline):
                        self._fail(f"{self.peer} has not read for {self._send_timeout_s:g} s")
                except OSError as error:
                    self._fail(f"sending to {self.peer}: {error.strerror or error}")

    def receive(self, timeout_s: float) -> M | None:
        """Returns the next message, or None after `timeout_s`; raises ChannelClosedError.

        Messages that arrived before the connection ended are still returned.
        """
        deadline = time.monotonic() + timeout_s
        with self._receive_lock:
            while not self._received:
                if self._is_broken:
                    self._check_open()
                try:
                    data = self._socket.recv(_RECEIVE_BYTES)
                except BlockingIOError:
                    self._check_open()
                    if not self._wait(select.POLLIN, deadline):
                        return None
                    continue
                except OSError as error:
                    self._fail(f"receiving from {self.peer}: {error.strerror or error}")
                if not data:
                    self._fail(f"{self.peer} has closed the connection")
                self._decode(data)
                if not self._received and time.monotonic() >= deadline:
                    return None
            return self._received.popleft()

    def close(self) -> None:
        """Closes the connection; threads waiting in `send` or `receive` wake and raise.
        Idempotent."""
        self._end("closed on this side")
        with self._send_lock, self._receive_lock:  # no thread uses the descriptor any more
            self._socket.close()

    def _decode(self, data: bytes) -> None:
        self._frames.feed(data)
        try:
            for payload in self._frames.payloads():
                try:
                    self._received.append(self._decoder.decode(payload))
                # ValueError: text is not UTF-8. RecursionError: nested a thousand levels deep.
                except (msgspec.MsgspecError, ValueError, RecursionError):
                    self.num_malformed += 1
        except BrokenStreamError as error:
            self._is_broken = True  # `receive` raises after it has returned the rest
            self._end(f"{self.peer} sent {error}")

    def _wait(self, event: int, deadline: float) -> bool:
        """Waits until the socket is ready or has ended; returns False at the deadline."""
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return False
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(remaining_s * 1000))

    def _check_open(self) -> None:
        if self._reason is not None:
            raise ChannelClosedError(f"the control connection has ended: {self._reason}.")

    def _fail(self, reason: str) -> NoReturn:
        self._end(reason)
        raise ChannelClosedError(f"the control connection has ended: {self._reason}.")

    def _end(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
        # Not close(): another thread may be in poll() on this descriptor, and shutdown wakes it.
        with contextlib.suppress(OSError):  # the peer closed it first
            self._socket.shutdown(socket.SHUT_RDWR)


def connect(
    host: str,
    port: int,
    secret: ClusterSecret,
    decoder: msgspec.msgpack.Decoder[M],
    timeout_s: float,
) -> Channel[M]:
    """Connects and authenticates, retrying until `timeout_s`; raises ClusterError."""
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        remaining_s = max(0.01, deadline - time.monotonic())
        try:
            connection = connect_once(host, port, secret, min(_ATTEMPT_S, remaining_s))
            return Channel(connection, decoder)
        except HandshakeError as error:
            reason, is_final = error.reason, error.is_final
        except OSError as error:
            reason, is_final = error.strerror or str(error), False
        if is_final or time.monotonic() + pause_s >= deadline:
            tried = "" if is_final else f" within {timeout_s:g} s"
            raise ClusterError(f"cannot reach {host} on port {port}{tried}: {reason}.")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def connect_once(host: str, port: int, secret: ClusterSecret, timeout_s: float) -> socket.socket:
    """Connects and authenticates; raises OSError and HandshakeError."""
    connection = socket.create_connection((host, port), timeout_s)
    try:
        connect_handshake(connection, secret, timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def set_options(connection: socket.socket) -> None:
    """Sends without delay, and notices a peer that cannot be reached any more."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _LIVENESS.items():
        if hasattr(socket, name):  # macOS lacks some of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _address(connection: socket.socket) -> str:
    try:
        host, port = connection.getpeername()[:2]
    except OSError:
        return "a peer that has left"
    return f"{host}:{port}"
