"""The record of an answer: the events that are tokens, their times, and what counts as an error."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.bench.client import answer
from moe_serve.bench.client.answer import AnswerReader, SseParser
from moe_serve.bench.client.connection import Connection
from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.errors import BenchStreamError
from tests.support.bench.fake_openai import event, http, streamed, text_events

DONE = b"data: [DONE]\n\n"


def chat(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}]}


def text(content: str, num_tokens: int | None = None) -> dict[str, Any]:
    usage = {} if num_tokens is None else {"usage": {"completion_tokens": num_tokens}}
    return {"choices": [{"index": 0, "text": content}], **usage}


def read(*timed: tuple[float, bytes], status: int = 200, is_stream: bool = True) -> RequestRecord:
    """The record of a body whose pieces come at these times; it ends with the last."""
    answer = AnswerReader(is_stream=is_stream)
    answer.head(status)
    for at, piece in timed:
        answer.body(at, piece)
    answer.finish(timed[-1][0])
    return answer.record(index=3, scheduled_s=1.0, started_s=1.5, wanted_tokens=4)


class TestTimes:
    def test_of_a_stream(self) -> None:
        record = read(
            (2.0, event(chat(role="assistant", content=""))),  # no token: the role alone
            (3.0, event(chat(content="a"))),
            (3.5, b": ping\n\n" + event(chat(content="b"))),
            (5.0, event(chat(content="c")) + event({"choices": [], "usage": {
                "prompt_tokens": 7, "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 2}}})),
            (6.0, event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + DONE),
        )  # fmt: skip
        assert record.is_ok, record
        assert (record.first_s, record.last_s, record.end_s) == (3.0, 5.0, 6.0)
        assert (record.ttft_s, record.e2e_s, record.lateness_s) == (2.0, 5.0, 0.5)
        assert record.gaps_s == array("d", [0.5, 1.5])
        assert record.tpot_s == 1.0, "2 s for the two tokens after the first"
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 3, 2)

    def test_tpot_counts_tokens_and_not_events(self) -> None:
        usage = event({"choices": [], "usage": {"completion_tokens": 5}})
        record = read((2.0, event(text("a"))), (6.0, event(text("bcde")) + usage + DONE))
        assert record.num_events == 2
        assert record.tpot_s == 1.0, "4 s for four tokens in one event"

    def test_usage_with_each_event(self) -> None:
        """A first event with three tokens does not count in TPOT; a token without text counts."""
        record = read(
            (2.0, event(text("abc", 3))),
            (3.0, event(text("", 4))),  # held back by a parser
            (6.0, event(text("de", 6)) + DONE),
        )
        assert (record.first_tokens, record.gap_tokens) == (3, array("L", [1, 2]))
        assert record.gaps_s == array("d", [1.0, 3.0])
        assert record.tpot_s == pytest.approx(4.0 / 3)

    @pytest.mark.parametrize("field", ["content", "reasoning", "reasoning_content", "refusal"])
    def test_all_kinds_of_text_are_tokens(self, field: str) -> None:
        record = read((2.0, event(chat(**{field: "x"})) + DONE))
        assert record.num_events == 1

    def test_tool_calls_are_tokens(self) -> None:
        record = read((2.0, event(chat(tool_calls=[{"index": 0}])) + DONE))
        assert record.num_events == 1

    def test_one_token_has_no_tpot(self) -> None:
        record = read((2.0, text_events(["a"])))
        assert record.is_ok and record.tpot_s is None, record

    def test_without_usage_events_are_counted(self) -> None:
        record = read((2.0, event(text("a"))), (3.0, event(text("b")) + DONE))
        assert record.output_tokens is None
        assert (record.counted_tokens, record.tpot_s) == (2, 1.0)

    def test_without_streaming(self) -> None:
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        body = json.dumps({"choices": [{"text": "abc"}], "usage": usage}).encode()
        record = read((2.0, body[:9]), (4.0, body[9:]), is_stream=False)
        assert record.is_ok and (record.ttft_s, record.e2e_s) == (None, 3.0), record
        assert record.output_tokens == 3


class TestErrors:
    @pytest.mark.parametrize(
        ("body", "kind", "detail"),
        [
            (event(text("a")), "broken answer", r"without \[DONE\]"),
            (b"data: {nonsense\n\n", "broken answer", "nonsense"),
            (b'data: {"choices": 3}\n\n', "broken answer", "array"),
            (DONE, "broken answer", "no choices"),
            (event({"error": {"message": "it broke"}}) + DONE, "error in stream", "it broke"),
            (b'data: {"choices": [{"text": "\xff"}]}\n\n' + DONE, "broken answer", "invalid start"),
            (b'data: {"error": ' + b"[" * 100_000 + b"\n\n", "broken answer", "recursion depth"),
        ],
    )
    def test_in_a_stream(self, body: bytes, kind: str, detail: str) -> None:
        record = read((2.0, body))
        assert record.error == kind
        with pytest.raises(AssertionError, match=detail):
            raise AssertionError(record.detail)

    def test_a_status(self) -> None:
        body = json.dumps({"error": {"message": "too many"}}).encode()
        record = read((2.0, body), status=429)
        assert (record.error, record.detail, record.end_s) == ("HTTP 429", "too many", 2.0)

    def test_a_status_whose_body_is_no_utf_8(self) -> None:
        record = read((2.0, b'{"error": {"message": "\xff"}}'), status=500)
        assert record.error == "HTTP 500" and "message" in record.detail, record

    def test_what_a_server_says_does_not_steer_the_terminal(self) -> None:
        body = json.dumps({"error": {"message": "red\x1b[31m\nand more"}}).encode()
        assert read((2.0, body), status=500).detail == "red [31m and more"

    def test_not_json(self) -> None:
        record = read((2.0, b"<html>"), is_stream=False)
        assert record.error == "broken answer" and "<html>" in record.detail, record


class Transport:
    def write(self, content: bytes) -> None: ...

    def abort(self) -> None: ...


def through_http(pieces: list[bytes], now: Callable[[], float] = lambda: 2.0) -> RequestRecord:
    """The record of an answer whose bytes a connection gets in these pieces."""

    async def run() -> RequestRecord:
        connection = Connection(now)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        answer = AnswerReader(is_stream=True)
        exchange = asyncio.ensure_future(connection.exchange(b"", answer))
        await asyncio.sleep(0)
        for piece in pieces:
            connection.data_received(piece)
        connection.connection_lost(None)
        await exchange
        return answer.record(index=0, scheduled_s=0.0, started_s=0.0, wanted_tokens=3)

    return asyncio.run(run())


WHOLE = b"".join(streamed(text_events(["Grüße", "\r\n", "c"], prompt_tokens=4, cached=1)))


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_any_cut_of_the_bytes_gives_the_same_record(places: list[int]) -> None:
    edges = [0, *sorted({place % len(WHOLE) for place in places}), len(WHOLE)]
    pieces = [WHOLE[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    record = through_http([piece for piece in pieces if piece])
    assert record == through_http([WHOLE])
    assert (record.num_events, record.output_tokens, record.cached_tokens) == (3, 3, 1)


class TestConnection:
    def test_the_clock_is_read_when_bytes_come(self) -> None:
        ticks = iter(range(100))
        head, *chunks = streamed(text_events(["a"])[:-14])
        more = [b"%x\r\n%s\r\n" % (len(DONE), DONE)]
        record = through_http([head, chunks[0], *more, chunks[1]], lambda: float(next(ticks)))
        assert (record.first_s, record.end_s) == (1.0, 2.0), "second and third piece"

    def test_a_body_without_length_ends_with_the_connection(self) -> None:
        record = through_http([b"HTTP/1.1 200 OK\r\n\r\n" + text_events(["a", "b"])])
        assert record.is_ok and record.output_tokens == 2, record

    def test_bytes_that_are_no_text_at_the_end_of_a_connection(self) -> None:
        """An exception at this point would be lost, and the request would wait for its timeout."""
        record = through_http([b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": "\xff"}'])
        assert record.error == "broken answer", record

    @pytest.mark.parametrize(
        ("content", "kind"),
        [
            (b"", "connection lost"),
            (WHOLE[:120], "connection lost"),
            (b"SSH-2.0-OpenSSH\r\n\r\n", "broken answer"),
            (http(503, b'{"error": {"message": "later"}}'), "HTTP 503"),
        ],
    )
    def test_what_goes_wrong(self, content: bytes, kind: str) -> None:
        record = through_http([content] if content else [])
        assert record.error == kind, record


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


class TestDeadlines:
    REFUSAL = json.dumps({"error": {"code": "deadline_unmeetable", "message": "too late"}}).encode()

    def test_a_refusal_has_a_kind_of_its_own(self) -> None:
        record = read((2.0, self.REFUSAL), status=429)
        assert (record.error, record.detail) == ("deadline_unmeetable", "too late")
        others = json.dumps({"error": {"code": "server_overloaded", "message": "full"}}).encode()
        assert read((2.0, others), status=429).error == "HTTP 429"
        assert read((2.0, b"[1"), status=429).error == "HTTP 429"

    def test_an_answer_that_is_ended_at_its_deadline(self) -> None:
        late = {"error": {"code": "deadline_exceeded", "message": "it is over"}}
        record = read((2.0, event(text("a")) + event(late) + DONE))
        assert (record.error, record.detail) == ("deadline_exceeded", "it is over")

    @pytest.mark.parametrize(
        ("value", "seconds"), [("250", 0.25), ("2.5", 0.0025), ("soon", None), ("", None)]
    )
    def test_the_forecast_comes_in_a_header(self, value: str, seconds: float | None) -> None:
        header = f"\r\nX-Predicted-TTFT-ms: {value}\r\n\r\n".encode()
        record = through_http([WHOLE.replace(b"\r\n\r\n", header, 1)])
        assert record.is_ok and record.predicted_ttft_s == seconds
