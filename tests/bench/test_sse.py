"""Server-sent events: the same ones, however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.bench.client import answer
from moe_serve.bench.client.answer import SseParser
from moe_serve.errors import BenchStreamError

STREAM = (
    "\ufeffdata: one\n\n: a comment\n\ndata:two\r\n\r\nevent: x\rdata: three\rdata:  four\r\r"
    "id: 7\n\ndata\n\ndata: Grüße\r\n\ndata: last"
).encode()
EVENTS = [b"one", b"two", b"three\n four", b"", "Grüße".encode(), b"last"]


def parsed(pieces: list[bytes]) -> list[bytes]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def cut(content: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(content) + 1) for place in places}), len(content)]
    return [content[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def test_by_hand() -> None:
    assert parsed([STREAM]) == EVENTS
    assert parsed([bytes([byte]) for byte in STREAM]) == EVENTS, "byte by byte"


@given(st.lists(st.integers(0, 10_000), max_size=30))
def test_any_cut_gives_the_same_events(places: list[int]) -> None:
    assert parsed(cut(STREAM, places)) == EVENTS


def test_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "MAX_EVENT_BYTES", 100)
    parser = SseParser()
    parser.feed(b"data: " + b"x" * 60)
    with pytest.raises(BenchStreamError, match="larger than 100 bytes"):
        parser.feed(b"x" * 60)
    parser = SseParser()
    with pytest.raises(BenchStreamError, match="larger than 100 bytes"):
        for _ in range(30):
            parser.feed(b"data: abcdef\n")  # lines that never become an event
