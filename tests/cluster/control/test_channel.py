"""Messages over a real loopback socket, and how a channel ends."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest

from moe_serve.cluster.control.byte_stream import frame
from moe_serve.cluster.control.channel import Channel, connect
from moe_serve.cluster.control.secret import new_secret
from moe_serve.errors import ChannelClosedError, ClusterError
from tests.support.cluster.control_pair import Cluster, Ping, Text, decoder


def raw_pair(**limits: float) -> tuple[socket.socket, Channel]:
    """A bare socket, and the channel at its other end: the handshake has been."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, Channel(far, decoder(), **limits)


def test_messages_go_both_ways_in_order(cluster: Cluster) -> None:
    near, far = cluster.pair()
    for number in range(100):
        near.send(Ping(number))
    far.send(Text("back", [1, 2]))
    assert [far.receive(60) for _ in range(100)] == [Ping(number) for number in range(100)]
    assert near.receive(60) == Text("back", [1, 2])


def test_a_message_of_several_megabytes(cluster: Cluster) -> None:
    near, far = cluster.pair()
    long = Text("x" * 8_000_000)
    sender = threading.Thread(target=near.send, args=(long,))
    sender.start()
    received = far.receive(60)
    sender.join()
    assert received == long, "a long message arrived changed"


def test_nothing_to_receive_is_none(cluster: Cluster) -> None:
    near, _ = cluster.pair()
    assert near.receive(0) is None
    assert near.receive(0.01) is None


def test_many_threads_may_send(cluster: Cluster) -> None:
    near, far = cluster.pair()
    threads = [
        threading.Thread(target=lambda first=i: [near.send(Ping(first + j)) for j in range(50)])
        for i in range(0, 200, 50)
    ]
    for thread in threads:
        thread.start()
    numbers = {message.number for message in (far.receive(60) for _ in range(200))}
    for thread in threads:
        thread.join()
    assert numbers == set(range(200))
    assert far.num_malformed == 0, "frames of two threads were mixed"


def test_the_other_end_sees_the_close_after_what_was_sent(cluster: Cluster) -> None:
    near, far = cluster.pair()
    near.send(Ping(1))
    near.close()
    near.close()
    assert far.receive(60) == Ping(1)
    with pytest.raises(ChannelClosedError, match="has closed the connection"):
        far.receive(60)
    assert far.is_closed
    with pytest.raises(ChannelClosedError):
        near.send(Ping(2))


def test_close_wakes_a_waiting_receiver(cluster: Cluster) -> None:
    near, _ = cluster.pair()
    reasons: list[str] = []
    is_waiting = threading.Event()

    def wait() -> None:
        is_waiting.set()
        try:
            near.receive(60)
        except ChannelClosedError as error:
            reasons.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    is_waiting.wait()
    near.close()
    thread.join(60)
    assert reasons == ["the control connection has ended: closed on this side."]


def test_malformed_frames_are_counted_and_dropped() -> None:
    near, channel = raw_pair()
    encode = msgspec.msgpack.encode
    bad = [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # a list of 4 billion
        encode({"type": "Unknown"}),
        encode({"type": "Ping", "number": "one"}),
        encode({"type": "Ping"}),
        encode([1, 2]),
        b"\x82\xa4type\xa4Text\xa4text\xa2\xff\xff",  # not UTF-8
        b"\x83\xa4type\xa4Ping\xa6number\x01\xa1y" + b"\x91" * 100_000,  # nested deep
    ]
    with near:
        for payload in bad:
            near.sendall(frame(payload))
        near.sendall(frame(encode(Ping(7))))
        assert channel.receive(60) == Ping(7), "the connection did not survive"
        assert channel.num_malformed == len(bad)
    channel.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "a frame that starts with b'GET '"),
        (b"MSC\x01\xff\xff\xff\xff", "a frame of 4294967295 bytes, but the limit is 67108864"),
        (b"MSC\x02\x00\x00\x00\x00", r"starts with b'MSC\\x02'"),
    ],
)
def test_a_stream_that_is_no_frames_closes_it(data: bytes, words: str) -> None:
    near, channel = raw_pair()
    with near:
        near.sendall(frame(msgspec.msgpack.encode(Ping(7))) + data)
        assert channel.receive(60) == Ping(7), "what came before was lost"
        with pytest.raises(ChannelClosedError, match=words):
            channel.receive(60)
        assert channel.is_closed
    channel.close()


def test_a_truncated_frame_is_no_message() -> None:
    near, channel = raw_pair()
    whole = frame(msgspec.msgpack.encode(Text("some words")))
    near.sendall(whole[:-1])
    assert channel.receive(0.01) is None
    near.close()
    with pytest.raises(ChannelClosedError, match="has closed"):
        channel.receive(60)
    channel.close()


def test_a_peer_that_never_reads_is_given_up() -> None:
    near, channel = raw_pair(send_timeout_s=0.2)
    with near, pytest.raises(ChannelClosedError, match=r"has not read for 0\.2 s"):
        while True:
            channel.send(Text("x" * 1_000_000))
    assert channel.is_closed
    channel.close()


def test_connect_names_what_it_could_not_reach() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening
        port = unused.getsockname()[1]
        words = f"cannot reach 127.0.0.1 on port {port} within 0.1 s: Connection refused"
        with pytest.raises(ClusterError, match=words):
            connect("127.0.0.1", port, new_secret(), decoder(), 0.1)


def test_connect_with_another_secret_fails_at_once(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match=r"on port \d+: the cluster secrets differ"):
        cluster.connect(new_secret())
    assert cluster.accepted.empty(), "a stranger was handed over"


def test_connect_to_another_service_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220")
                connection.sendall(b" ")  # four bytes tell enough
                connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ClusterError, match="not the control protocol"):
            connect("127.0.0.1", server.getsockname()[1], new_secret(), decoder(), 10)
        thread.join()
