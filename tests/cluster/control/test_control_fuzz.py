"""Anything at all at the control port: nothing is run, nobody is harmed, everything is counted.

One listener serves all examples of a test: what one of them broke, a later one would notice.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moe_serve.cluster.control.byte_stream import MAGIC, NONCE_BYTES, FrameReader, frame
from moe_serve.cluster.control.channel import Channel
from moe_serve.errors import ChannelClosedError
from tests.support.cluster.control_pair import Cluster, Message, Ping, Text, decoder, open_cluster

QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
MESSAGES = st.one_of(
    st.builds(Ping, st.integers(-(2**63), 2**63 - 1)),
    st.builds(Text, st.text(max_size=50), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9)),
)


def pickle_that_writes(path: Path) -> bytes:
    """What `builtins.open(path, "w")` is as a pickle, written by hand."""
    return b"\x80\x04cbuiltins\nopen\n(V" + str(path).encode() + b"\nVw\ntR."


def bare_pair() -> tuple[socket.socket, Channel[Message]]:
    """A bare socket, and the channel at its other end: the handshake has been."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, Channel(far, decoder())


def send_and_wait(connection: socket.socket, data: bytes) -> None:
    """Returns when the listener has closed the connection."""
    with contextlib.suppress(OSError):  # it may have been closed in the middle
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def received(channel: Channel[Message]) -> tuple[list[Message], str]:
    """All messages until the end, and the reason of the end. The other end is closed already."""
    messages = []
    try:
        while True:
            message = channel.receive(10)
            assert message is not None, "neither a message nor an end"
            messages.append(message)
    except ChannelClosedError as error:
        return messages, str(error)
    finally:
        channel.close()


@pytest.fixture(scope="module")
def port() -> Iterator[Cluster]:
    with open_cluster() as opened:
        yield opened


def check_it_serves(cluster: Cluster) -> None:
    near, far = cluster.pair()
    near.send(Ping(1))
    assert far.receive(10) == Ping(1), "a good client is not served any more"
    near.close()
    far.close()


@QUICK
@given(data=st.binary(max_size=300))
@example(data=b"")
@example(data=MAGIC)
@example(data=MAGIC + bytes(NONCE_BYTES))
@example(data=MAGIC + b"\xff" * 400)
@example(data=frame(msgspec.msgpack.encode(Ping(1))) * 20)
def test_strangers_with_any_bytes(port: Cluster, data: bytes) -> None:
    num_before = sum(port.listener.num_rejected.values())
    with socket.create_connection(("127.0.0.1", port.listener.port), 10) as connection:
        send_and_wait(connection, data)
    for thread in threading.enumerate():
        if thread.name == "control-handshake":
            thread.join(10)
    assert sum(port.listener.num_rejected.values()) == num_before + 1, "it was not counted"
    assert port.accepted.empty(), "a stranger was handed over"
    check_it_serves(port)


def test_a_pickle_is_bytes_like_others(port: Cluster, tmp_path: Path) -> None:
    """As a stranger's greeting, and as a frame of a peer that knows the secret."""
    made = tmp_path / "made"
    data = pickle_that_writes(made)
    with socket.create_connection(("127.0.0.1", port.listener.port), 10) as connection:
        send_and_wait(connection, data)
    near, channel = bare_pair()
    with near:
        near.sendall(frame(data) + frame(msgspec.msgpack.encode(Ping(1))))
    assert received(channel)[0] == [Ping(1)]
    assert channel.num_malformed == 1
    assert not made.exists(), "a pickle was loaded"
    check_it_serves(port)


@QUICK
@given(
    messages=st.lists(MESSAGES, max_size=8),
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6),
)
def test_frames_survive_any_cut(messages: list[Message], sizes: list[int]) -> None:
    """However TCP cuts the stream, the messages are the same."""
    stream = b"".join(frame(msgspec.msgpack.encode(message)) for message in messages)
    reader, payloads = FrameReader(), []
    for size in itertools.cycle(sizes):
        if not stream:
            break
        reader.feed(stream[:size])
        payloads += reader.payloads()
        stream = stream[size:]
    assert [decoder().decode(payload) for payload in payloads] == messages


@QUICK
@given(
    payloads=st.lists(
        st.one_of(
            st.binary(max_size=60),
            MESSAGES.map(msgspec.msgpack.encode),
            st.tuples(MESSAGES.map(msgspec.msgpack.encode), st.integers(0, 40)).map(
                lambda item: item[0][: item[1]]
            ),
        ),
        max_size=10,
    )
)
def test_bad_frames_among_good_ones(payloads: list[bytes]) -> None:
    good = []
    for payload in payloads:
        with contextlib.suppress(msgspec.MsgspecError, ValueError):
            good.append(decoder().decode(payload))
    near, channel = bare_pair()
    with near:
        near.sendall(b"".join(map(frame, payloads)))
    messages, reason = received(channel)
    assert messages == good
    assert channel.num_malformed == len(payloads) - len(good)
    assert "has closed the connection" in reason, "a bad frame has closed it"


@QUICK
@given(
    tail=st.one_of(
        st.binary(min_size=8, max_size=60).filter(lambda data: data[:4] != MAGIC),
        st.integers(64 * 2**20 + 1, 2**32 - 1).map(lambda n: MAGIC + struct.pack(">I", n)),
    )
)
def test_a_stream_that_goes_wrong_ends_after_its_last_message(tail: bytes) -> None:
    near, channel = bare_pair()
    with near:
        near.sendall(frame(msgspec.msgpack.encode(Ping(5))) + tail)
    messages, reason = received(channel)
    assert messages == [Ping(5)]
    assert "sent a frame" in reason


def test_a_reset_connection_ends_both_directions() -> None:
    """The peer's machine is back, and knows nothing of the connection: RST in place of FIN."""
    near, channel = bare_pair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    near.close()
    with pytest.raises(ChannelClosedError, match="Connection reset by peer"):
        channel.receive(10)
    with pytest.raises(ChannelClosedError):
        channel.send(Ping(1))
    channel.close()


def test_half_open_connections_cost_a_time_out_and_no_more() -> None:
    """One direction closed, the other silent; and a peer that never reads a byte."""
    near, channel = bare_pair()
    near.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelClosedError, match="has closed the connection"):
        channel.receive(10)
    channel.close()
    near.close()
    with open_cluster(handshake_timeout_s=1.0) as cluster:
        with socket.create_connection(("127.0.0.1", cluster.listener.port), 10) as connection:
            connection.sendall(MAGIC)
            while connection.recv(100):
                pass
        check_it_serves(cluster)
