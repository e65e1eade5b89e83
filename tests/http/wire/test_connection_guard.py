"""Request heads that are too large, too slow or no HTTP, and clients that do not read: on
sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from moe_serve.http.wire.httptools_protocol import MAX_HEAD_BYTES, GuardedHttpToolsProtocol
from moe_serve.http.wire.transports import LEAST_TAKEN_BYTES, ConnectionGuard

GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"
HEAD_TIMEOUT_S = 0.5


@pytest.fixture(scope="module")
def server(new_server: Any) -> Iterator[Any]:
    with new_server() as live:
        yield live


@pytest.fixture
def guarded(server: Any) -> Any:
    server.engine.step_s, server.engine.script = 0.0, lambda request: "Hello"
    server.engine.aborted.clear()
    return server


@pytest.fixture
def hasty(guarded: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server with a short timeout for heads, for tests whose heads come late or at once."""
    monkeypatch.setattr(GuardedHttpToolsProtocol, "head_timeout_s", HEAD_TIMEOUT_S)
    return guarded


@contextlib.contextmanager
def connection(live: Any) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as raw:
        yield raw


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def read_all(raw: socket.socket) -> bytes:
    answer = b""
    while chunk := raw.recv(65536):
        answer += chunk
    return answer


def error_code(answer: bytes, status: int) -> str:
    """Returns the code of an answer that has the envelope, an id, and an end."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"\r\nx-request-id: req-" in head
    assert b"\r\nconnection: close" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


def test_heads_up_to_the_limit_are_served(guarded: Any) -> None:
    headers = {"x-long": "a" * (MAX_HEAD_BYTES - 1000)}
    for _ in range(2):
        assert httpx.get(f"{guarded.url}/health/live", headers=headers).status_code == 200


@pytest.mark.parametrize("piece", [b"x-a: " + b"a" * 1000 + b"\r\n", b"a" * 1000])
def test_a_large_head_is_refused(guarded: Any, piece: bytes) -> None:
    """This includes endless heads of many headers or of one."""
    with connection(guarded) as raw:
        raw.sendall(GET + b"x-b: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):  # 1 MB, of which the server keeps a part
                raw.sendall(piece)
        assert error_code(read_all(raw), 431) == "headers_too_large"
    with connection(guarded) as raw:
        raw.sendall(GET + b"x-b: " + b"b" * (10 * MAX_HEAD_BYTES) + b"\r\n\r\n")
        assert error_code(read_all(raw), 431) == "headers_too_large"
    assert httpx.get(f"{guarded.url}/health/live").status_code == 200


def test_a_slow_head_is_refused_and_silence_is_closed(hasty: Any) -> None:
    start = time.monotonic()
    with connection(hasty) as silent, connection(hasty) as slow:
        slow.sendall(GET)
        assert error_code(read_all(slow), 408) == "request_timeout"
        assert read_all(silent) == b""
        assert time.monotonic() - start > 0.9 * HEAD_TIMEOUT_S


def test_a_dripping_head_gains_no_time(hasty: Any) -> None:
    """Without a limit it would go on for half an hour."""
    start = time.monotonic()
    with connection(hasty) as raw:
        for byte in itertools.chain(GET, b"x-drip: ", itertools.repeat(ord("a"), 60_000)):
            raw.sendall(bytes([byte]))
            if select.select([raw], [], [], 0.03)[0]:
                break
        assert error_code(read_all(raw), 408) == "request_timeout"
        assert time.monotonic() - start > 0.9 * HEAD_TIMEOUT_S


def test_no_http_is_refused(guarded: Any) -> None:
    with connection(guarded) as raw:
        raw.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert error_code(read_all(raw), 400) == "invalid_http"


def test_idle_connections_and_long_answers_outlive_the_timer(hasty: Any) -> None:
    """The timer runs only while a head is incomplete, not between requests or during an answer."""
    hasty.engine.step_s = 0.3 * HEAD_TIMEOUT_S  # six of them
    connections = hasty.server.server_state.connections
    wait_until(lambda: not connections, "a connection of the test before is left")
    with httpx.Client(base_url=hasty.url, timeout=60) as client:
        for _ in range(2):
            text = client.post("/v1/completions", json={"prompt": "a", "stream": True}).text
            assert text.endswith("data: [DONE]\n\n")
            time.sleep(1.5 * HEAD_TIMEOUT_S)
        (only,) = connections
        assert only.cycle is not None


def test_a_slow_second_head_is_refused(hasty: Any) -> None:
    with connection(hasty) as raw:
        raw.sendall(GET + b"\r\n")
        answer = b""
        while not answer.endswith(b"}"):  # head and body may come one after the other
            answer += raw.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
        time.sleep(1.5 * HEAD_TIMEOUT_S)
        raw.sendall(GET)
        assert error_code(read_all(raw), 408) == "request_timeout"


def test_a_request_in_pieces_is_served(guarded: Any) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    ) + body
    with connection(guarded) as raw:
        for i in range(0, len(request), 40):
            raw.sendall(request[i : i + 40])
            time.sleep(0.001)
        assert b'"text":"He"' in read_all(raw)


def test_pipelined_requests_are_served(guarded: Any) -> None:
    """A large body before a head does not count as part of that head."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode().ljust(200_000)
    post = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    ) + body
    with connection(guarded) as raw:
        raw.sendall(post + post + GET + b"Connection: close\r\n\r\n")
        answer = read_all(raw)
    assert answer.count(b"HTTP/1.1 200") == 3


def test_a_reader_that_does_not_read_is_cut(guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise keep its generation and its pages for as long as it likes."""
    monkeypatch.setattr(GuardedHttpToolsProtocol, "write_timeout_s", 0.2)
    engine = guarded.engine
    engine.script = lambda request: "x" * 500
    engine.step_s = 0.002
    fields = {"prompt": "a", "max_tokens": 500, "n": 64, "stream": True, "logprobs": 1}
    body = json.dumps(fields).encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", guarded.port))
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        wait_until(lambda: len(engine.aborted) == 64, "the generation goes on for nobody")
        assert engine.running == {}
        connections = guarded.server.server_state.connections
        wait_until(lambda: not connections, "the connection is kept")


@pytest.mark.parametrize("less, cut_at", [(LEAST_TAKEN_BYTES, None), (LEAST_TAKEN_BYTES - 1, 60.0)])
def test_a_reader_of_a_large_answer_is_cut_only_if_it_takes_little(
    run_in_virtual_time: Any, less: int, cut_at: float | None
) -> None:
    """A slow but steady reader may take an hour for the whole answer."""
    cuts: list[float] = []
    unsent = [200 * LEAST_TAKEN_BYTES]
    transport: Any = SimpleNamespace(
        abort=lambda: cuts.append(asyncio.get_running_loop().time()),
        get_write_buffer_size=lambda: unsent[0],
    )

    async def read() -> None:
        loop = asyncio.get_running_loop()
        guard = ConnectionGuard(loop, lambda: None, head_timeout_s=1.0, write_timeout_s=60.0)
        guard.open(transport)
        guard.end_head()
        guard.stall_writing()
        for _ in range(60):
            await asyncio.sleep(59.9)
            unsent[0] -= less
            await asyncio.sleep(0.1)
        guard.resume_writing()
        await asyncio.sleep(100.0)

    run_in_virtual_time(read())
    assert [round(at, 1) for at in cuts] == ([] if cut_at is None else [cut_at])


def test_a_client_that_leaves_ends_its_request_also_with_others_behind_it(guarded: Any) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 5, "stream": True}).encode()
    post = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    guarded.engine.gate = asyncio.Event()  # never set: only the client's leaving ends it
    try:
        with connection(guarded) as raw:
            raw.sendall(post + GET + b"\r\n")
            wait_until(lambda: bool(guarded.engine.running), "it does not run")
        wait_until(lambda: bool(guarded.engine.aborted), "the generation goes on for nobody")
    finally:
        guarded.open_gate()
        guarded.engine.gate = None


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


def test_an_upgrade_is_not_heeded(guarded: Any, caplog: pytest.LogCaptureFixture) -> None:
    with connection(guarded) as raw:
        raw.sendall(GET + UPGRADE + b"\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
    assert "upgrade" not in caplog.text.lower(), "some clients ask for it each time"


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n"]
)
def test_an_upgrade_beside_a_body_is_said_to_be_one(guarded: Any, framing: bytes) -> None:
    """The parser takes the rest for another protocol, so the body would be empty."""
    with connection(guarded) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + UPGRADE + framing)
        assert error_code(read_all(raw), 400) == "upgrade_with_body"


@pytest.mark.parametrize("rest", [b"x", b"xx"], ids=["a part", "the end"])
def test_the_rest_of_a_body_keeps_no_connection_open(
    guarded: Any, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    """The rest of the body comes after the answer, and nothing comes after it."""
    monkeypatch.setattr(guarded.server.config, "timeout_keep_alive", 0.3)
    with connection(guarded) as raw:
        raw.sendall(GET + b"Content-Length: 2\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        raw.sendall(rest)
        read_all(raw)


def test_the_rest_of_a_body_and_the_next_request(
    guarded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The idle timer of the connection ends with the next request."""
    monkeypatch.setattr(guarded.server.config, "timeout_keep_alive", 0.3)
    guarded.engine.step_s = 0.2  # for longer than that
    body = json.dumps({"prompt": "a", "max_tokens": 4}).encode()
    post = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    with connection(guarded) as raw:
        raw.sendall(GET + b"Content-Length: 2\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        raw.sendall(b"xx" + post)
        assert b'"text":"Hell"' in read_all(raw)
