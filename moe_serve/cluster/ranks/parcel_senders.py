"""Sends parcels to the ports of other ranks: a thread and a connection for each port."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.transfer.parcel_header import TAKEN, ParcelHeader
from moe_serve.cache.transfer.wire_pages import checksum
from moe_serve.cluster.control.byte_stream import HandshakeError
from moe_serve.cluster.control.channel import connect_once, set_options
from moe_serve.cluster.control.parcel_messages import PagesSent, ParcelReport, SendPages
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.ranks.parcel_stream import receive_all, send_all
from moe_serve.cluster.ranks.shard_parcels import Slots
from moe_serve.errors import ChannelClosedError

_IDLE_S = 120.0  # a link without parcels for so long ends
_CLOSE_S = 1.0

Address = tuple[str, int]
Page = NDArray[np.uint8]
_Item = tuple[SendPages, float]  # with its deadline


class _Link:
    """The connection to one port. It is made when it is needed, and again after an error."""

    def __init__(self, address: Address, secret: ClusterSecret, timeout_s: float) -> None:
        self.address, self._secret, self._timeout_s = address, secret, timeout_s
        self.waiting: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self._connection: socket.socket | None = None
        self._is_ended = False

    def send(self, header: ParcelHeader, pages: Sequence[Page], deadline: float) -> str:
        """Sends a parcel. Returns why it has not arrived, or ""."""
        remaining_s, answer = deadline - time.monotonic(), bytearray(len(TAKEN))
        try:
            if remaining_s <= 0:
                raise TimeoutError("parcels before it took too long")
            connection = self._connect(remaining_s)
            send_all(connection, memoryview(header.pack()), deadline)
            for page in pages:
                send_all(connection, page.data, deadline)
            receive_all(connection, memoryview(answer), deadline)
        except (OSError, HandshakeError) as error:
            self.close()
            why = "it was too slow" if isinstance(error, TimeoutError) else str(error)
            return f"the link to {self.address[0]} port {self.address[1]} failed ({why})"
        if answer != TAKEN:
            self.close()
            return f"{self.address[0]} port {self.address[1]} refused them"
        return ""

    def end(self) -> None:
        """Ends the connection for good, on any thread."""
        self._is_ended = True
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):  # the peer closed it first
                connection.shutdown(socket.SHUT_RDWR)

    def _connect(self, timeout_s: float) -> socket.socket:
        if self._connection is None:
            self._connection = connect_once(*self.address, self._secret, timeout_s)
            set_options(self._connection)
            if self._is_ended:
                raise ConnectionError("the rank ends")
        return self._connection

    def close(self) -> None:
        """Closes the connection, on the link's thread; the next parcel makes a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class ParcelSenders:
    """Sends what the rank has copied into its slots. `send` is called by its main thread."""

    def __init__(
        self,
        secret: ClusterSecret,
        identity: bytes,
        slots: Slots,
        timeout_s: float,
        tell: Callable[[ParcelReport], None],
    ) -> None:
        """`tell` is called on the threads."""
        self._secret, self._identity, self._slots = secret, identity, slots
        self._timeout_s, self._tell = timeout_s, tell
        self._lock = threading.Lock()  # guards the links
        self._links: dict[Address, _Link] = {}
        self._is_closed = False

    def send(self, order: SendPages) -> None:
        """Sends the slots of an order. PagesSent is reported when they have been read."""
        address = (order.host, order.port)
        with self._lock:
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = _Link(address, self._secret, self._timeout_s)
                name = f"parcels to {order.host}:{order.port}"
                thread = threading.Thread(target=self._run, args=(link,), name=name, daemon=True)
                link.thread = thread
                thread.start()
            link.waiting.put((order, time.monotonic() + self._timeout_s))

    def close(self) -> None:
        """Ends all connections, even in the middle of a parcel."""
        with self._lock:
            self._is_closed = True
            links = list(self._links.values())
        for link in links:
            link.waiting.put(None)
            link.end()
        for link in links:
            if link.thread is not None:
                link.thread.join(_CLOSE_S)

    def _run(self, link: _Link) -> None:
        """Sends one parcel after the other, until the rank ends or none has come for a while."""
        try:
            while (item := self._next(link)) is not None:
                order, deadline = item
                header = self._header(order)
                why = link.send(header, [self._slots[slot] for slot in order.slots], deadline)
                self._tell(PagesSent(ticket=order.ticket, checksum=header.checksum, why=why))
        except ChannelClosedError:
            pass  # the rank ends
        finally:
            link.close()

    def _header(self, order: SendPages) -> ParcelHeader:
        return ParcelHeader(
            num_pages=len(order.slots),
            page_bytes=self._slots.shape[1],
            ticket=order.ticket,
            identity=self._identity,
            checksum=checksum(order.slots, self._slots),
        )

    def _next(self, link: _Link) -> _Item | None:
        while True:
            with contextlib.suppress(queue.Empty):
                item = link.waiting.get(timeout=_IDLE_S)
                return None if self._is_closed else item
            with self._lock:
                if link.waiting.empty():
                    del self._links[link.address]
                    return None
