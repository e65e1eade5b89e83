"""Events written straight to the connection give the same answer as through every layer."""

from __future__ import annotations

import json
import re
import socket
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moe_serve.http.generation import respond
from moe_serve.http.wire.body_writer import BodyWriter, body_writer_of, offer_body_writer

FIELDS = {
    "prompt": "ab",
    "max_tokens": 40,
    "stream": True,
    "stream_options": {"include_usage": True},
}
_MADE = re.compile(rb'"id":"[^"]*"|"created":\d+|x-request-id: \S+|date: [^\r]*', re.IGNORECASE)
_CHUNK = re.compile(rb"([0-9a-f]+)\r\n")


COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(raw: socket.socket, port: int, fields: dict[str, Any], path: str = COMPLETION) -> None:
    body = json.dumps(fields).encode()
    raw.settimeout(60)
    raw.connect(("127.0.0.1", port))
    raw.sendall(
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body
    )


def read_all(raw: socket.socket) -> bytes:
    taken = bytearray()
    while chunk := raw.recv(65536):
        taken += chunk
    return bytes(taken)


def chunks_of(answer: bytes) -> bytes:
    """Returns the body, whose chunks must be whole and end with an empty one."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    body, place = b"", 0
    while True:
        size = _CHUNK.match(rest, place)
        assert size is not None, rest[place : place + 60]
        start, count = size.end(), int(size[1], 16)
        body += rest[start : start + count]
        place = start + count + 2
        assert rest[place - 2 : place] == b"\r\n"
        if count == 0:
            assert place == len(rest), "something follows the end"
            return body


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "fields", "least"),
    [
        (COMPLETION, {}, 30),
        (COMPLETION, {"echo": True, "return_token_ids": True}, 30),
        (COMPLETION, {"stop": ["o! H"], "include_stop_str_in_output": True}, 0),
        (COMPLETION, {"stop": ["rld! Hello, w"]}, 10),
        (COMPLETION, {"logprobs": 2}, 30),
        (COMPLETION, {"stream_options": {"continuous_usage_stats": True}}, 30),
        (CHAT, {}, 30),
        (CHAT, {"logprobs": True, "return_token_ids": True}, 30),
        (CHAT, {"stop": ["ö"]}, 5),
    ],
)
def test_a_stream_is_the_same_bytes(
    live: Any, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], least: int
) -> None:
    live.engine.script = lambda request: "Hello, wörld! " * 3
    live.engine.at_readers_pace = True  # an event for each token
    whole = FIELDS | fields
    if path == CHAT:
        whole["messages"] = [{"role": "user", "content": whole.pop("prompt")}]
    written: list[bytes] = []
    write = BodyWriter.write

    def counting(self: BodyWriter, part: bytes) -> None:
        written.append(part)
        write(self, part)

    def stream() -> bytes:
        with socket.socket() as raw:
            ask(raw, live.port, whole, path)
            return read_all(raw)

    monkeypatch.setattr(BodyWriter, "write", counting)
    direct = stream()
    assert len(written) > least, "it went through the layers: nothing is shown"
    assert chunks_of(direct).endswith(b"data: [DONE]\n\n")
    written.clear()
    monkeypatch.setattr(respond, "body_writer_of", lambda scope: None)
    assert _MADE.sub(b"", stream()) == _MADE.sub(b"", direct)
    assert not written


def test_a_reader_that_stops_for_a_while_gets_all(live: Any) -> None:
    """Its connection is full, so events wait and follow each other when it reads on."""
    live.engine.script = lambda request: "x" * 400
    fields = FIELDS | {"max_tokens": 400, "n": 64, "logprobs": 1}
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ask(raw, live.port, fields)

        def is_paused() -> bool:
            connections = [*live.server.server_state.connections]
            return any(connection.flow.write_paused for connection in connections)

        wait_until(is_paused, "the reader was never too slow")
        events = chunks_of(read_all(raw)).split(b"\n\n")
    texts = dict.fromkeys(range(64), "")
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {"x" * 400}
    assert events[-2:] == [b"data: [DONE]", b""]


class Cycle(SimpleNamespace):
    """The attributes of uvicorn's cycle that a writer reads."""


def open_cycle(written: list[bytes], **fields: Any) -> Any:
    usual = {
        "disconnected": False,
        "response_complete": False,
        "chunked_encoding": True,
        "flow": SimpleNamespace(write_paused=False),
        "transport": SimpleNamespace(write=written.append),
    }
    return Cycle(**(usual | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"disconnected": True},
        {"response_complete": True},
        {"chunked_encoding": False},
        {"chunked_encoding": None},
        {"flow": SimpleNamespace(write_paused=True)},
    ],
)
def test_what_cannot_be_taken_at_once_goes_the_other_way(fields: dict[str, Any]) -> None:
    written: list[bytes] = []
    closed, usual = open_cycle(written, **fields), open_cycle(written)
    assert not BodyWriter(closed).is_open
    writer = BodyWriter(usual)
    assert writer.is_open
    writer.write(b"data: 1\n\n")
    assert written == [b"9\r\ndata: 1\n\n\r\n"]


def test_a_writer_does_not_keep_what_it_writes_for() -> None:
    """The request's scope has the writer, and the cycle has the scope, so a reference back would be
    a circle."""
    scope: dict[str, Any] = {}
    cycle = open_cycle([], scope=scope)
    offer_body_writer(scope, cycle)
    writer, gone = body_writer_of(scope), weakref.ref(cycle)
    del cycle
    assert gone() is None and writer is not None and not writer.is_open
    writer.write(b"x")  # to nobody
