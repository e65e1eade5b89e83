"""The port at which an attention rank receives parcels from ranks without common memory.

Bytes go to slots that the coordinator has named for a ticket, never to pages. A parcel that is not
expected any more is refused, and one whose slots are not named yet waits for them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_serve.cache.transfer.parcel_header import (
    HEADER_BYTES,
    REFUSED,
    TAKEN,
    ParcelError,
    ParcelHeader,
)
from moe_serve.cluster.control.channel import set_options
from moe_serve.cluster.control.listener import SocketListener
from moe_serve.cluster.control.parcel_messages import (
    ExpectPages,
    ForgetPages,
    PagesArrived,
    PagesTaken,
    ParcelReport,
)
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.ranks.parcel_stream import forget_deadline, receive_all
from moe_serve.cluster.ranks.shard_parcels import Slots
from moe_serve.errors import ChannelClosedError

_log = logging.getLogger(__name__)

FORGOTTEN = "it is not expected any more"


@dataclass(slots=True)
class _Expected:
    slots: Sequence[int]
    is_coming: bool = False  # a thread writes to the slots
    is_forgotten: bool = False


class ParcelPort:
    """The port of one rank. Each connection has a thread. The rank's main thread calls `expect` and
    `forget`.
    """

    def __init__(
        self,
        host: str,
        secret: ClusterSecret,
        identity: bytes,
        slots: Slots,
        timeout_s: float,
        tell: Callable[[ParcelReport], None],
    ) -> None:
        """`slots` are the rank's own. `tell` may be called on any thread. Raises ConfigError."""
        self._identity, self._slots, self._timeout_s = identity, slots, timeout_s
        self._tell = tell
        self._changed = threading.Condition()  # guards the fields below
        self._expected: dict[int, _Expected] = {}  # by ticket
        self._last_ticket = 0  # the highest that was ever expected
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self._listener = SocketListener(host, 0, secret, self._serve)

    @property
    def port(self) -> int:
        return int(self._listener.port)

    def expect(self, order: ExpectPages) -> None:
        with self._changed:
            self._expected[order.ticket] = _Expected(order.slots)
            self._last_ticket = max(self._last_ticket, order.ticket)
            self._changed.notify_all()

    def forget(self, order: ForgetPages) -> PagesTaken | None:
        """Stops expecting a parcel. Returns the answer, or None if a thread still writes to the
        slots; then that thread answers.
        """
        with self._changed:
            expected = self._expected.get(order.ticket)
            if expected is not None and expected.is_coming:
                expected.is_forgotten = True
                return None
            self._expected.pop(order.ticket, None)
        return PagesTaken(ticket=order.ticket, why=FORGOTTEN)

    def close(self) -> None:
        """Stops listening and ends all connections."""
        with self._changed:
            self._is_closed = True
            for connection in self._connections:
                with contextlib.suppress(OSError):  # the peer closed it first
                    connection.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        """Receives the parcels of one connection, on the thread of its handshake."""
        with self._changed:
            if self._is_closed:
                connection.close()
                return
            self._connections.add(connection)
        try:
            set_options(connection)
            while self._receive(connection):
                continue
        except ParcelError as error:
            _log.warning("a parcel was refused: %s", error)
        except (OSError, ChannelClosedError):
            pass  # one end is gone; the loss of expected parcels has been reported
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()

    def _receive(self, connection: socket.socket) -> bool:
        """Receives one parcel; returns False if the connection is to end. Raises ParcelError,
        after which the next header cannot be found, OSError and ChannelClosedError."""
        forget_deadline(connection)  # until the next parcel begins
        first = connection.recv(1)
        if not first:
            return False
        deadline = time.monotonic() + self._timeout_s
        rest = bytearray(HEADER_BYTES - 1)
        receive_all(connection, memoryview(rest), deadline)
        header = ParcelHeader.unpack(first + rest)
        expected = self._claim(header.ticket, deadline)
        if expected is None:
            connection.sendall(REFUSED)
            if header.ticket <= self._last_ticket:
                return False  # its lease has ended, which is usual when requests end
            raise ParcelError(f"the one with ticket {header.ticket} is not expected")
        why = "the rank ends"
        try:
            header.check(self._identity, self._slots.shape[1], len(expected.slots))
            for slot in expected.slots:
                receive_all(connection, self._slots[slot].data, deadline)
            why = ""
        except ParcelError as error:
            why = str(error)
            connection.sendall(REFUSED)
            raise
        except OSError as error:
            why = f"the link broke ({error.strerror or error})"
            raise
        finally:
            self._arrived(header, why)
        connection.sendall(TAKEN)
        return True

    def _claim(self, ticket: int, deadline: float) -> _Expected | None:
        """Waits until a parcel is expected. Returns None if it is not expected, or no longer."""
        with self._changed:
            while not self._is_closed:
                expected = self._expected.get(ticket)
                if expected is not None:
                    if expected.is_coming:
                        return None  # a second parcel with the same ticket
                    expected.is_coming = True
                    return expected
                remaining_s = deadline - time.monotonic()
                if ticket <= self._last_ticket or remaining_s <= 0:
                    return None
                self._changed.wait(remaining_s)
        return None

    def _arrived(self, header: ParcelHeader, why: str) -> None:
        """Reports that the slots are no longer written to. Raises ChannelClosedError."""
        with self._changed:
            expected = self._expected.pop(header.ticket)
        if expected.is_forgotten:
            self._tell(PagesTaken(ticket=header.ticket, why=FORGOTTEN))
        else:
            self._tell(PagesArrived(ticket=header.ticket, checksum=header.checksum, why=why))
