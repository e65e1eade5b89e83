"""Strangers at the control port: refused, counted, and no obstacle to others."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest

from moe_serve.cluster.control.byte_stream import (
    CLOSED,
    MAGIC,
    NONCE_BYTES,
    NOT_OURS,
    TIMED_OUT,
    WRONG_SECRET,
)
from moe_serve.cluster.control.listener import CROWDED_OUT, bound_socket
from moe_serve.errors import ConfigError
from tests.support.cluster.control_pair import Cluster, Ping, open_cluster


def stranger(cluster: Cluster) -> socket.socket:
    return socket.create_connection(("127.0.0.1", cluster.listener.port), 10)


def read_to_end(connection: socket.socket) -> bytes:
    """Everything until the other end closes: then it has counted us."""
    data = b""
    try:
        while piece := connection.recv(4096):
            data += piece
    except ConnectionResetError:
        pass
    return data


def rejected(cluster: Cluster, num_expected: int) -> dict[str, int]:
    """The counts once `num_expected` handshakes are over (their threads count after closing)."""
    for thread in threading.enumerate():
        if thread.name == "control-handshake":
            thread.join(60)
    counts = cluster.listener.num_rejected
    assert sum(counts.values()) == num_expected, f"rejected {counts}"
    return counts


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_every_interface_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="means every interface"):
        bound_socket(host, 0)


def test_every_interface_when_the_user_said_so() -> None:
    with bound_socket("0.0.0.0", 0, is_any_allowed=True) as listening:
        assert listening.getsockname()[0] == "0.0.0.0"


def test_it_listens_on_the_given_interface_only(cluster: Cluster) -> None:
    places = {
        tuple(item.laddr)
        for item in psutil.Process().net_connections()
        if item.status == psutil.CONN_LISTEN and item.laddr[1] == cluster.listener.port
    }
    assert places == {("127.0.0.1", cluster.listener.port)}


def test_a_port_in_use_and_a_foreign_address_are_named(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1 port {cluster.listener.port}: Address"):
        bound_socket("127.0.0.1", cluster.listener.port)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 port 0: Cannot assign"):
        bound_socket("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", NOT_OURS),
        (b"\x80\x04\x95" + b"cos\nsystem\n(S'true'\ntR.", NOT_OURS),  # a pickle
        (MAGIC + bytes(64), WRONG_SECRET),
        (
            b"MSC\x09" + bytes(64),
            "the peer uses version 9 of the control protocol, but this process uses 1",
        ),
        (MAGIC + b"half", CLOSED),
    ],
)
def test_strangers_are_counted_by_reason(cluster: Cluster, data: bytes, reason: str) -> None:
    with stranger(cluster) as connection:
        connection.sendall(data)
        with contextlib.suppress(OSError):  # refused already
            connection.shutdown(socket.SHUT_WR)
        read_to_end(connection)
    assert rejected(cluster, 1) == {reason: 1}
    near, far = cluster.pair()
    near.send(Ping(1))
    assert far.receive(60) == Ping(1)


def test_a_silent_stranger_times_out() -> None:
    with open_cluster(handshake_timeout_s=0.05) as cluster:
        with stranger(cluster) as connection:
            read_to_end(connection)
        assert rejected(cluster, 1) == {TIMED_OUT: 1}


def test_a_trickling_stranger_times_out() -> None:
    """The time-out is that of the whole handshake: a byte now and then does not extend it."""
    with open_cluster(handshake_timeout_s=0.1) as cluster:
        with stranger(cluster) as connection:
            try:
                for byte in MAGIC * 1000:
                    connection.sendall(bytes([byte]))
                    connection.settimeout(0.05)
                    try:
                        if not connection.recv(100):
                            break
                    except TimeoutError:
                        continue
            except OSError:
                pass  # closed by the listener
        assert rejected(cluster, 1) == {TIMED_OUT: 1}


def test_a_recorded_handshake_is_worth_nothing(cluster: Cluster) -> None:
    """A go-between records a true handshake and plays it again."""
    with stranger(cluster) as first:
        challenge = first.recv(len(MAGIC) + NONCE_BYTES)
        answer = MAGIC + bytes(NONCE_BYTES)
        answer += cluster.secret.proof("connecting", challenge[4:], bytes(NONCE_BYTES))
        first.sendall(answer)
        assert len(first.recv(32)) == 32, "the true handshake failed"
    cluster.accepted.get(timeout=60).close()
    with stranger(cluster) as second:
        second.sendall(answer)
        read_to_end(second)
    assert rejected(cluster, 1) == {WRONG_SECRET: 1}
    assert cluster.accepted.empty(), "the replay was let in"


def test_its_own_proof_sent_back_is_refused(cluster: Cluster) -> None:
    """Reflection: a proof for the accepting role does not do for the connecting role."""
    with stranger(cluster) as connection:
        challenge = connection.recv(len(MAGIC) + NONCE_BYTES)
        nonce = challenge[4:]
        connection.sendall(MAGIC + nonce + cluster.secret.proof("accepting", nonce, nonce))
        assert read_to_end(connection) == bytes(32), "anything but zeros is a proof"
    assert rejected(cluster, 1) == {WRONG_SECRET: 1}


@pytest.fixture
def crowd() -> Iterator[tuple[Cluster, list[socket.socket]]]:
    """200 connections that say nothing, all still open, at a listener that holds 16."""
    with open_cluster(max_pending=16, handshake_timeout_s=60) as cluster:
        strangers = [stranger(cluster) for _ in range(200)]
        yield cluster, strangers
        for connection in strangers:
            connection.close()


def test_two_hundred_silent_strangers_stop_nobody(
    crowd: tuple[Cluster, list[socket.socket]],
) -> None:
    cluster, _ = crowd
    near, far = cluster.pair()
    near.send(Ping(1))
    assert far.receive(60) == Ping(1)
    assert cluster.listener.num_pending <= 16
    assert set(cluster.listener.num_rejected) == {CROWDED_OUT}


def test_refusals_are_logged_once_a_second(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            with stranger(cluster) as connection:
                connection.sendall(b"x" * 100)
                read_to_end(connection)
        rejected(cluster, 20)
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) < 20, f"{len(lines)} lines for 20 refusals"
    assert "refused a connection from 127.0.0.1:" in lines[0]
    assert NOT_OURS in lines[0]


def test_close_ends_pending_handshakes_and_frees_the_port() -> None:
    num_before, others = psutil.Process().num_fds(), set(threading.enumerate())
    with open_cluster(handshake_timeout_s=60) as cluster:
        near, far = cluster.pair()
        silent = stranger(cluster)
        cluster.listener.close()
        near.send(Ping(1))
        assert far.receive(60) == Ping(1), "a channel handed over must stay open"
        assert len(read_to_end(silent)) in (0, 36)
        with bound_socket("127.0.0.1", cluster.listener.port):
            pass
        silent.close()
    for thread in set(threading.enumerate()) - others:
        if thread.name.startswith("control-"):
            thread.join(60)
    assert psutil.Process().num_fds() <= num_before, "descriptors leaked"
