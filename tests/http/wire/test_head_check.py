"""Ambiguous heads are refused, and trailers behind a body never become headers."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moe_serve.http.wire.httptools_protocol import (
    MAX_HEAD_BYTES,
    GuardedHttpToolsProtocol,
    head_error,
)

KEY = b"Authorization: Bearer one\r\n"
JSON = b"Content-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
HOST = b"Host: localhost\r\n"
BODY = b'{"prompt": "a", "max_tokens": 2}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKS = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)  # without the trailers and the empty line
TRAILER_BYTES = 10 * MAX_HEAD_BYTES


@pytest.fixture(scope="module")
def server(new_server: Callable[..., Any]) -> Iterator[Any]:
    with new_server(api_keys=("one",), admin_keys=("chief",)) as live:
        yield live


@contextlib.contextmanager
def connection(server: Any) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
        yield raw


def read_all(raw: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionError):
        while chunk := raw.recv(65536):
            answer += chunk
    return answer


def ask(server: Any, *segments: bytes) -> bytes:
    """Sends the parts of a request one after the other and returns the answer."""
    with connection(server) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):  # it may be refused before its end
            for segment in segments:
                raw.sendall(segment)
        return read_all(raw)


def num_answers(data: bytes) -> int:
    return len(re.findall(rb"HTTP/1\.1 \d{3} ", data))


def get(path: bytes, headers: bytes, version: bytes = b"1.1") -> bytes:
    return b"GET %b HTTP/%b\r\n%bConnection: close\r\n\r\n" % (path, version, headers)


def post(headers: bytes, version: bytes = b"1.1") -> bytes:
    head = b"POST /v1/completions HTTP/%b\r\n%bConnection: close\r\n" % (version, HOST)
    return head + JSON + headers + b"\r\n"


def assert_answer(answer: bytes, status: int, code: str = "") -> None:
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert code.encode() in answer, answer


@pytest.mark.parametrize("is_split", [False, True], ids=["one segment", "many segments"])
@pytest.mark.parametrize(
    ("path", "trailer"),
    [
        (b"/v1/models", KEY),
        (b"/v1/models", b"X-Api-Key: one\r\n"),
        (b"/v1/models", b"x-a: b\r\n" + KEY + b"x-c: d\r\n"),
        (b"/admin/placement", b"Authorization: Bearer chief\r\n"),
        (b"/admin/placement", b"Host: localhost\r\nX-Api-Key: chief\r\n"),
    ],
)
def test_a_key_in_a_trailer_opens_nothing(
    server: Any, path: bytes, trailer: bytes, is_split: bool
) -> None:
    request = get(path, HOST + CHUNKED) + b"0\r\n" + trailer + b"\r\n"
    segments = [request[i : i + 7] for i in range(0, len(request), 7)] if is_split else [request]
    answer = ask(server, *segments)
    if answer or not is_split:  # the refusal may come, and go, before the last segment is sent
        assert_answer(answer, 401, "invalid_api_key")


@pytest.mark.parametrize(
    "trailer",
    [
        b"x-checksum: 1\r\n",
        b"Host: evil.example\r\nConnection: upgrade\r\nUpgrade: websocket\r\n",
        b"Expect: 100-continue\r\nContent-Type: text/plain\r\nX-Api-Key: two\r\n",
    ],
)
def test_trailers_change_nothing(server: Any, trailer: bytes) -> None:
    answer = ask(server, post(KEY + CHUNKED) + CHUNKS + trailer + b"\r\n")
    assert_answer(answer, 200, '"text":"He"')


def test_trailers_are_not_given_to_the_next_request(server: Any) -> None:
    first = b"GET /health/live HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n0\r\n" + KEY + b"\r\n"
    answer = ask(server, first + first + get(b"/v1/models", HOST))
    assert answer.count(b"HTTP/1.1 200") == 2 and answer.count(b"HTTP/1.1 401") == 1, answer


@pytest.mark.parametrize("name", [b"Content-Length: 5\r\n", CHUNKED])
def test_a_length_in_a_trailer_is_refused(server: Any, name: bytes) -> None:
    assert_answer(ask(server, post(KEY + CHUNKED) + CHUNKS + name + b"\r\n"), 400, "invalid_http")


def endless(server: Any, start: bytes, piece: bytes) -> bytes:
    """Sends a request until the connection is closed and returns the answer."""
    with connection(server) as raw:
        raw.sendall(start)
        with contextlib.suppress(ConnectionError):
            for _ in range(TRAILER_BYTES // len(piece) + 1):
                raw.sendall(piece)
        return read_all(raw)


@pytest.mark.parametrize(
    "piece", [b"a: b\r\n" * 1000, b"x" * 5000, b"x: " + b"y" * 5000], ids=["lines", "name", "value"]
)
@pytest.mark.parametrize(
    "start",
    [
        b"GET /health/live HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n",
        post(KEY + CHUNKED) + CHUNKS[:-3],
    ],
    ids=["answered", "awaited"],
)
def test_endless_trailers_are_cut(server: Any, start: bytes, piece: bytes) -> None:
    """They are cut even after an answer was sent, and inside a name or a value."""
    answer = endless(server, start + b"0\r\n", piece)
    if answer.startswith(b"HTTP/1.1 200"):  # it was given before the limit was reached
        assert num_answers(answer) == 1, "the client would take it for the next answer"
    elif answer:
        assert_answer(answer, 431, "headers_too_large")
    assert_answer(ask(server, get(b"/health/live", HOST)), 200)


def test_the_extensions_of_a_chunk_have_a_limit_too(server: Any) -> None:
    answer = endless(server, post(KEY + CHUNKED) + b"1;", b"a=b;" * 1000)
    if answer:
        assert_answer(answer, 431, "headers_too_large")


def test_many_small_chunks_are_no_trailers(server: Any) -> None:
    """Each byte of the body has six bytes of framing: more in sum than a head may have."""
    body = BODY.ljust(2 * MAX_HEAD_BYTES // 5)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    assert_answer(ask(server, post(KEY + CHUNKED), chunks + b"0\r\n\r\n"), 200, '"text":"He"')


def test_trailers_leave_no_memory(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of headers, which lives as long as the connection, does not grow."""
    seen: list[int] = []
    complete = GuardedHttpToolsProtocol.on_message_complete

    def count(protocol: GuardedHttpToolsProtocol) -> None:
        seen.append(len(protocol.headers))
        complete(protocol)

    monkeypatch.setattr(GuardedHttpToolsProtocol, "on_message_complete", count)
    trailers = b"a: b\r\n" * 5000
    answer = ask(server, get(b"/health/live", HOST + CHUNKED) + b"0\r\n" + trailers + b"\r\n")
    assert_answer(answer, 200)
    assert seen == [3], "Host, Transfer-Encoding and Connection"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        (HOST + HOST + KEY, "repeated_header"),
        (HOST + b"Host: evil.example\r\n" + KEY, "repeated_header"),
        (KEY, "invalid_host"),
        (b"Host: a b\r\n" + KEY, "invalid_host"),
        (b"Host: a,b\r\n" + KEY, "invalid_host"),
        (b"Host: user@a/b\r\n" + KEY, "invalid_host"),
        (b"Host: a:b\r\n" + KEY, "invalid_host"),
        (HOST + KEY + KEY, "repeated_header"),
        (HOST + b"Authorization: Bearer two\r\n" + KEY, "repeated_header"),
        (HOST + b"X-Api-Key: one\r\nx-api-key: two\r\n", "repeated_header"),
        (HOST + KEY + b"Expect: a\r\nExpect: b\r\n", "repeated_header"),
    ],
)
def test_heads_with_two_readings_are_refused(server: Any, headers: bytes, code: str) -> None:
    assert_answer(ask(server, get(b"/v1/models", headers)), 400, code)


@pytest.mark.parametrize(
    "host", [b"", b"a", b"a:", b"a.b-c_d:80", b"127.0.0.1", b"[::1]:8000", b" a ", b"m\xc3\xbc.de"]
)
def test_ordinary_hosts_are_served(server: Any, host: bytes) -> None:
    assert_answer(ask(server, get(b"/v1/models", b"Host: %b\r\n" % host + KEY)), 200)


def test_old_and_unknown_versions(server: Any) -> None:
    assert_answer(ask(server, get(b"/v1/models", KEY, b"1.0")), 200)
    for version in (b"0.9", b"2.0"):
        answer = ask(server, get(b"/v1/models", HOST + KEY, version))
        assert_answer(answer, 505, "http_version_not_supported")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (LENGTH + LENGTH, 400),
        (LENGTH + b"Content-Length: 3\r\n", 400),
        (b"Content-Length: 32, 32\r\n", 400),
        (b"Content-Length: +32\r\n", 400),
        (b"Content-Length: 0x20\r\n", 400),
        (LENGTH + CHUNKED, 400),
        (CHUNKED + LENGTH, 400),
        (CHUNKED + CHUNKED, 400),
        (b"Transfer-Encoding : chunked\r\n", 400),
        (b"Transfer-Encoding: \x0bchunked\r\n", 400),
        (b"Transfer-Encoding:\r\n chunked\r\n", 400),
        (b"Transfer-Encoding: chunked, identity\r\n", 400),
        (b"Transfer-Encoding: identity\r\n", 501),
        (b"Transfer-Encoding: xchunked\r\n", 501),
        (b"Transfer-Encoding: gzip, chunked\r\n", 501),
        (JSON + LENGTH, 400),
    ],
)
def test_bodies_of_doubtful_length_are_refused(server: Any, headers: bytes, status: int) -> None:
    """In one of two readings, the rest of the bytes may be a second request."""
    hidden = get(b"/v1/models", HOST + KEY)
    for rest in (BODY, CHUNKS + b"\r\n", CHUNKS + b"\r\n" + hidden):
        answer = ask(server, post(KEY + headers) + rest)
        assert_answer(answer, status)
        assert num_answers(answer) == 1, answer


def test_http_1_0_has_no_chunks(server: Any) -> None:
    answer = ask(server, post(KEY + CHUNKED, b"1.0") + CHUNKS + b"\r\n")
    assert_answer(answer, 400, "Transfer-Encoding")
    assert_answer(ask(server, post(KEY + LENGTH, b"1.0") + BODY), 200, '"text":"He"')


def test_a_large_head_with_many_small_headers() -> None:
    headers = [(b"host", b"x")] + [(b"a", b"")] * (MAX_HEAD_BYTES // 5)
    error = head_error("1.1", b"/" * 10, headers, asks_for_upgrade=False)
    assert error is not None and error.status == 431


def test_a_stream_over_http_1_0_ends_with_the_connection(server: Any) -> None:
    """HTTP/1.0 clients know no chunks. The events are those of HTTP/1.1."""
    body = b'{"prompt": "a", "max_tokens": 4, "stream": true}'
    request = post(KEY + b"Content-Length: %d\r\n" % len(body), b"1.0") + body
    head, _, events = ask(server, request).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    assert b"transfer-encoding" not in head.lower() and b"content-length" not in head.lower()
    assert b"connection: close" in head.lower()
    lines = [line for line in events.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines), events
    assert len(lines) > 4 and lines[-1] == b"data: [DONE]"


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_answers_of_known_length_over_http_1_0(server: Any, method: bytes) -> None:
    answers = [
        ask(server, get(path, KEY, b"1.0").replace(b"GET", method))
        for path in (b"/health/live", b"/v1/models", b"/metrics", b"/missing")
    ]
    for answer in answers:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower(), head
        length = re.search(rb"content-length: (\d+)", head.lower())
        if method == b"GET" and length is not None:
            assert len(body) == int(length[1])
