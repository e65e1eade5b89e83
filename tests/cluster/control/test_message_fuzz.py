"""Every kind of control message with any fields, and every bit of a data frame's header.

What is no message of its kind is dropped and counted, and the thread that reads goes on; a frame
that is not the announced one is refused before a row of it is read.
"""

from __future__ import annotations

import queue
import socket
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_serve.cluster.control.byte_stream import frame
from moe_serve.cluster.control.channel import Channel
from moe_serve.cluster.control.messages import Heartbeat, Hello, Order, Report, TookExperts
from moe_serve.cluster.control.rank_link import Gone, LinkEvent, RankLink
from moe_serve.pipeline.frames.frame_header import HEADER_BYTES, Exchange, HostHeader, WireError
from tests.support.sampled_cases import EVERY_CASE

QUICK = settings(
    max_examples=200 if EVERY_CASE else 8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
REPORTS, ORDERS = typing.get_args(Report), typing.get_args(Order)
# Negative and huge counts, other types, what a length field may claim.
SCALARS = st.one_of(
    st.sampled_from([0, -1, 1, 2**31, 2**32, -(2**31), 2**63 - 1, -(2**63), 2**64 - 1]),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(
        "aZ0-\x00\u00e9\u6c34\U0001f600", max_size=8
    ),  # a set of all would take seconds to make
    st.binary(max_size=12),
)
FIELDS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.integers(-3, 3), inner, max_size=3)
    ),
    max_leaves=8,
)
EXCHANGE = Exchange(epoch=3, step=9, layer=2, micro_batch=1)


def packed(kind: type, fields: list[Any]) -> bytes:
    return msgspec.msgpack.encode([kind.__name__, *fields])


def pair(union: Any) -> tuple[socket.socket, Channel[Any]]:
    """A bare socket, and the channel at its other end: the handshake has been."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, Channel(far, msgspec.msgpack.Decoder(union))


@pytest.fixture(scope="module", params=[Report, Order], ids=["reports", "orders"])
def wire(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, Channel[Any], Any]]:
    near, channel = pair(request.param)
    yield near, channel, request.param
    near.close()
    channel.close()


@pytest.mark.parametrize("place", range(max(len(REPORTS), len(ORDERS))))
@QUICK
@given(fields=st.lists(FIELDS, max_size=14), cut=st.integers(0, 40))
def test_any_fields_of_any_message(wire: Any, place: int, fields: list[Any], cut: int) -> None:
    """Whole and cut short; the same connection serves all examples, so a dead one is noticed."""
    near, channel, union = wire
    kinds = typing.get_args(union)
    kind = kinds[place % len(kinds)]
    decoder, num_good, num_before = msgspec.msgpack.Decoder(union), 0, channel.num_malformed
    payloads = [packed(kind, fields), packed(kind, fields)[:cut]]
    for payload in payloads:
        try:
            decoder.decode(payload)
            num_good += 1
        except (msgspec.MsgspecError, ValueError):
            pass
    good = Heartbeat(step=1, clock_ns=2) if union == Report else ORDERS[-1]()
    near.sendall(b"".join(map(frame, payloads)) + frame(msgspec.msgpack.encode(good)))
    received = [channel.receive(10) for _ in range(num_good + 1)]
    assert received[-1] == good, "the good message behind them did not come"
    assert channel.num_malformed - num_before == len(payloads) - num_good, "not all are counted"


@pytest.fixture(scope="module")
def link() -> Iterator[tuple[socket.socket, RankLink, Any]]:
    near, channel = pair(Report)
    inbox: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
    opened = RankLink(channel, inbox, lambda _: None)
    hello = Hello(name="expert-0", pid=1, host="h", versions={})
    near.sendall(frame(msgspec.msgpack.encode(hello)))
    assert inbox.get(timeout=60).report == hello
    yield near, opened, inbox
    near.close()
    assert isinstance(inbox.get(timeout=60).report, Gone)


@QUICK
@given(kind=st.sampled_from([k for k in REPORTS if k is not Heartbeat]), fields=st.lists(FIELDS))
def test_the_thread_that_reads_a_rank_goes_on(link: Any, kind: type, fields: list[Any]) -> None:
    near, opened, inbox = link
    mark = TookExperts(why=f"after {kind.__name__}")
    near.sendall(frame(packed(kind, fields)) + frame(msgspec.msgpack.encode(mark)))
    while inbox.get(timeout=60).report != mark:
        pass
    assert opened.name == "expert-0"


@QUICK
@given(
    header=st.one_of(
        st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES),
        st.tuples(st.integers(0, HEADER_BYTES * 8 - 1), st.integers(0, 200)),
    ),
    most=st.integers(0, 64),
)
def test_no_header_makes_more_rows_than_were_planned(header: Any, most: int) -> None:
    """Noise, and a true header with one bit flipped: refused, or as many rows as fit."""
    buffer = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    place = HostHeader(buffer)
    if isinstance(header, bytes):
        buffer.copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    else:
        bit, rows = header
        place.write(EXCHANGE, rows, 0)
        buffer[bit // 8] ^= 1 << bit % 8
    try:
        assert 0 <= place.check(EXCHANGE, most, "expert-0") <= most
    except WireError as error:
        assert "expert-0" in str(error)


@pytest.mark.parametrize("rows", [65, 2**31, 2**32 - 1])
def test_a_frame_that_claims_more_rows_is_refused(rows: int) -> None:
    """A count over the plan would be read past the buffer's end."""
    place = HostHeader(torch.zeros(HEADER_BYTES, dtype=torch.uint8))
    place.write(EXCHANGE, rows, 0)
    with pytest.raises(WireError, match=f"sent {rows} rows, but at most 64 were planned"):
        place.check(EXCHANGE, 64, "expert-0")
