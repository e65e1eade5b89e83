"""Accepts connections on one interface and hands over the authenticated ones.

No frame of an unauthenticated peer is ever decoded, and no such peer can keep others out: every
handshake has its own short-lived thread and a time-out, and when too many are pending the oldest
one is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from moe_serve.cluster.control.byte_stream import HandshakeError, accept_handshake
from moe_serve.cluster.control.channel import Channel
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.errors import ConfigError

HANDSHAKE_TIMEOUT_S = 5.0
MAX_PENDING = 64
CROWDED_OUT = "closed to make room for newer connections"
_BACKLOG = 1024
_LOG_PERIOD_S = 1.0
_EVERY_INTERFACE = ("0.0.0.0", "::")
_log = logging.getLogger(__name__)

M = TypeVar("M")


def bound_socket(host: str, port: int, *, is_any_allowed: bool = False) -> socket.socket:
    """Returns a listening socket on the interface of `host` only; raises ConfigError.

    Listening on all interfaces is refused unless `is_any_allowed`: a control port serves the
    cluster's own network.
    """
    if not host or (host in _EVERY_INTERFACE and not is_any_allowed):
        raise ConfigError(
            f"the cluster's host is {host!r}, which means every interface; give the address of "
            "the interface by which the other nodes reach this one."
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}.") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}."
        ) from error
    return listening


class SocketListener:
    """Listens for connections on a thread of its own.

    `on_connection` is called on the handshake's thread, and owns the socket.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: ClusterSecret,
        on_connection: Callable[[socket.socket], None],
        *,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        max_pending: int = MAX_PENDING,
        is_any_allowed: bool = False,
    ) -> None:
        self._socket = bound_socket(host, port, is_any_allowed=is_any_allowed)
        self._socket.setblocking(False)
        self.host, self.port = self._socket.getsockname()[:2]
        self._secret = secret
        self._on_connection = on_connection
        self._handshake_timeout_s = handshake_timeout_s
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, None] = {}  # oldest first
        self._crowded_out: set[socket.socket] = set()
        self._rejected: Counter[str] = Counter()
        self._last_log_s = -_LOG_PERIOD_S
        self._is_closed = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._accept_all, name="control-listener")
        self._thread.daemon = True
        self._thread.start()

    @property
    def num_rejected(self) -> dict[str, int]:
        """Returns the number of refused connections by reason."""
        with self._lock:
            return dict(self._rejected)

    @property
    def num_pending(self) -> int:
        with self._lock:
            return len(self._pending)

    def close(self) -> None:
        """Stops listening and drops pending handshakes; those already handed over stay open."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for connection in self._pending:
                _shut_down(connection)
        self._wake.send(b"x")
        self._thread.join()
        for item in (self._wake, self._woken, self._socket):
            item.close()

    def _accept_all(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while not self._is_closed:
            poll.poll()
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                continue
            except OSError as error:  # the peer has left, or no descriptors are free
                self._reject("an unknown address", error.strerror or "accept failed")
                time.sleep(0.01)
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            if len(self._pending) >= self._max_pending:
                oldest = next(iter(self._pending))
                del self._pending[oldest]
                self._crowded_out.add(oldest)
                _shut_down(oldest)  # its thread wakes, counts and closes it
            self._pending[connection] = None
        thread = threading.Thread(
            target=self._greet, args=(connection,), name="control-handshake", daemon=True
        )
        thread.start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            address = "{}:{}".format(*connection.getpeername()[:2])
        except OSError:
            address = "a peer that has left"
        try:
            accept_handshake(connection, self._secret, self._handshake_timeout_s)
        except HandshakeError as error:
            is_crowded_out = self._forget(connection)
            connection.close()
            self._reject(address, CROWDED_OUT if is_crowded_out else error.reason)
            return
        if self._forget(connection) or self._is_closed:  # shut down while the handshake ended
            connection.close()
            self._reject(address, CROWDED_OUT)
            return
        self._on_connection(connection)

    def _forget(self, connection: socket.socket) -> bool:
        """Removes the connection from the pending ones; returns whether it was crowded out."""
        with self._lock:
            self._pending.pop(connection, None)
            is_crowded_out = connection in self._crowded_out
            self._crowded_out.discard(connection)
            return is_crowded_out

    def _reject(self, address: str, reason: str) -> None:
        with self._lock:
            self._rejected[reason] += 1
            now_s = time.monotonic()
            if self._is_closed or now_s - self._last_log_s < _LOG_PERIOD_S:
                return
            self._last_log_s = now_s
            total = self._rejected.total()
        _log.warning("refused a connection from %s: %s (%d refused so far)", address, reason, total)


class Listener(SocketListener, Generic[M]):
    """Listens for control connections; `on_channel` gets each one as a channel."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: ClusterSecret,
        decoder: msgspec.msgpack.Decoder[M],
        on_channel: Callable[[Channel[M]], None],
        *,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        max_pending: int = MAX_PENDING,
        is_any_allowed: bool = False,
    ) -> None:
        """Raises ConfigError if it cannot listen there."""
        super().__init__(
            host,
            port,
            secret,
            lambda connection: on_channel(Channel(connection, decoder)),
            handshake_timeout_s=handshake_timeout_s,
            max_pending=max_pending,
            is_any_allowed=is_any_allowed,
        )


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer closed it first
        connection.shutdown(socket.SHUT_RDWR)
