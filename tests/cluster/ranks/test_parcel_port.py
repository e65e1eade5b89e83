"""Both ends of a link between two hosts, each against a peer that is slow, lies or ends."""

from __future__ import annotations

import contextlib
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest

from moe_serve.cache.transfer.parcel_header import HEADER_BYTES, REFUSED, TAKEN, ParcelHeader
from moe_serve.cluster.control.channel import connect_once
from moe_serve.cluster.control.listener import SocketListener
from moe_serve.cluster.control.parcel_messages import (
    ExpectPages,
    ForgetPages,
    PagesArrived,
    PagesSent,
    PagesTaken,
    ParcelReport,
    SendPages,
)
from moe_serve.cluster.control.secret import new_secret
from moe_serve.cluster.ranks.parcel_port import ParcelPort
from moe_serve.cluster.ranks.parcel_senders import ParcelSenders

SECRET, IDENTITY, PAGE = new_secret(), bytes(range(32)), 1000
PAGES = np.random.default_rng(0).integers(0, 256, (3, PAGE)).astype(np.uint8)
HEADER = ParcelHeader(
    num_pages=3, page_bytes=PAGE, ticket=5, identity=IDENTITY, checksum=zlib.crc32(PAGES)
)
TIMEOUT_S = 100.0


class Target:
    """A port with six slots, and what it has told."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.told: SimpleQueue[ParcelReport] = SimpleQueue()
        self.slots = np.zeros((6, PAGE), dtype=np.uint8)
        self.port = ParcelPort("127.0.0.1", SECRET, IDENTITY, self.slots, timeout_s, self.told.put)

    def connect(self) -> socket.socket:
        connection = connect_once("127.0.0.1", self.port.port, SECRET, 20.0)
        connection.settimeout(20.0)
        return connection

    def next(self) -> ParcelReport:
        return self.told.get(timeout=20.0)


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.port.close()


def senders(tell: Callable[[ParcelReport], None], timeout_s: float = TIMEOUT_S) -> ParcelSenders:
    return ParcelSenders(SECRET, IDENTITY, PAGES, timeout_s, tell)


def order(port: int, ticket: int = 5) -> SendPages:
    return SendPages(ticket=ticket, pages=(), slots=(0, 1, 2), host="127.0.0.1", port=port)


def test_a_parcel_waits_until_it_is_expected(target: Target) -> None:
    """And others follow on the same connection."""
    told: SimpleQueue[ParcelReport] = SimpleQueue()
    sending = senders(told.put)
    for ticket in (5, 6):
        sending.send(order(target.port.port, ticket))
        target.port.expect(ExpectPages(ticket=ticket, slots=(4, 1, 3)))
        arrived = target.next()
        assert arrived == PagesArrived(ticket=ticket, checksum=HEADER.checksum)
        assert (target.slots[[4, 1, 3]] == PAGES).all() and not target.slots[[0, 2, 5]].any()
        assert told.get(timeout=20.0) == PagesSent(ticket=ticket, checksum=HEADER.checksum)
        target.slots[:] = 0
    sending.close()


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (
            replace(HEADER, identity=bytes(32)),
            "the identity of its pages is 000000000000, but 000102030405 is",
        ),
        (
            replace(HEADER, page_bytes=2**60),
            "the size of its pages is 1152921504606846976, but 1000",
        ),
        (replace(HEADER, num_pages=60000), "their number is 60000, but 3 is expected"),
    ],
)
def test_a_header_that_lies(target: Target, header: ParcelHeader, why: str) -> None:
    target.port.expect(ExpectPages(ticket=5, slots=(0, 1, 2)))
    with target.connect() as connection:
        connection.sendall(header.pack())
        assert connection.recv(1) == REFUSED
    report = target.next()
    assert isinstance(report, PagesArrived) and report.ticket == 5 and why in report.why
    assert not target.slots.any()


@pytest.mark.parametrize(
    ("data", "num_warnings"),
    [
        (b"GET / HTTP/1.1\r\n" * 10, 1),
        (HEADER.pack().replace(b"moe-page\x00\x01", b"moe-page\x00\x02"), 1),
        (replace(HEADER, ticket=4).pack(), 0),  # of a lease that has ended
    ],
)
def test_what_is_no_parcel_ends_the_connection(
    target: Target, data: bytes, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    target.port.expect(ExpectPages(ticket=5, slots=(0, 1, 2)))
    with target.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        while connection.recv(1):
            continue
    assert caplog.text.count("a parcel was refused") == num_warnings
    with target.connect() as connection:  # the next one is served
        connection.sendall(HEADER.pack() + PAGES.tobytes())
        assert connection.recv(1) == TAKEN
    assert target.next() == PagesArrived(ticket=5, checksum=HEADER.checksum)


def test_a_source_that_ends_in_a_parcel(target: Target) -> None:
    target.port.expect(ExpectPages(ticket=5, slots=(0, 1, 2)))
    with target.connect() as connection:
        connection.sendall(HEADER.pack() + PAGES.tobytes()[:-1])
    report = target.next()
    assert isinstance(report, PagesArrived) and "the other end closed it" in report.why


def test_a_source_that_is_slow() -> None:
    target = Target(timeout_s=0.2)
    target.port.expect(ExpectPages(ticket=5, slots=(0, 1, 2)))
    with target.connect() as connection:
        connection.sendall(HEADER.pack() + PAGES.tobytes()[:-1])
        report = target.next()
    assert isinstance(report, PagesArrived) and "the link broke" in report.why
    target.port.close()


def test_a_parcel_is_forgotten(target: Target) -> None:
    """At once if none of it has come; else when its last byte has."""
    target.port.expect(ExpectPages(ticket=4, slots=(5,)))
    answer = target.port.forget(ForgetPages(ticket=4))
    assert answer == PagesTaken(ticket=4, why="it is not expected any more")
    target.port.expect(ExpectPages(ticket=5, slots=(0, 1, 2)))
    with target.connect() as connection:
        connection.sendall(HEADER.pack() + PAGES.tobytes()[:-1])
        while not target.slots[2].any():
            continue
        assert target.port.forget(ForgetPages(ticket=5)) is None
        connection.sendall(PAGES.tobytes()[-1:])
        assert connection.recv(1) == TAKEN
    assert target.next() == PagesTaken(ticket=5, why="it is not expected any more")
    assert target.port.forget(ForgetPages(ticket=5)) == PagesTaken(
        ticket=5, why="it is not expected any more"
    )


def test_a_port_that_ends_ends_its_connections(target: Target) -> None:
    target.port.expect(ExpectPages(ticket=5, slots=(0, 1, 2)))
    with target.connect() as connection:
        connection.sendall(HEADER.pack() + PAGES.tobytes()[:-1])
        while not target.slots[2].any():
            continue
        target.port.close()
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda connection: connection.close(), "failed"),
        (lambda connection: connection.sendall(REFUSED), "refused them"),
        (lambda connection: None, "it was too slow"),
    ],
)
def test_a_target_that_fails(act: Callable[[socket.socket], None], why: str) -> None:
    """The sender says so in one sentence, and sends the next parcel on a new connection."""
    told: SimpleQueue[ParcelReport] = SimpleQueue()
    sending = senders(told.put, timeout_s=0.3)
    kept: list[socket.socket] = []
    is_well = threading.Event()

    def serve(connection: socket.socket) -> None:
        kept.append(connection)
        connection.settimeout(20.0)
        if not is_well.is_set():
            act(connection)
            return
        connection.recv(HEADER_BYTES + PAGES.nbytes, socket.MSG_WAITALL)
        connection.sendall(TAKEN)

    listener = SocketListener("127.0.0.1", 0, SECRET, serve)
    sending.send(order(listener.port))
    report = told.get(timeout=20.0)
    assert isinstance(report, PagesSent) and why in report.why
    is_well.set()
    sending.send(order(listener.port, 6))
    assert told.get(timeout=20.0) == PagesSent(ticket=6, checksum=HEADER.checksum)
    sending.close()
    listener.close()
    for connection in kept:
        connection.close()


def test_a_port_that_is_closed() -> None:
    told: SimpleQueue[ParcelReport] = SimpleQueue()
    sending = senders(told.put)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    sending.send(order(port))
    report = told.get(timeout=20.0)
    assert isinstance(report, PagesSent) and f"port {port} failed" in report.why
    sending.close()
