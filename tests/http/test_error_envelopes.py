"""Every error, including those of the protocol, has one envelope: the real server on a socket."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moe_serve.http.schema import json_body
from moe_serve.http.wire.httptools_protocol import GuardedHttpToolsProtocol

KEY = b"Authorization: Bearer one\r\n"
JSON = b"Content-Type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + KEY


@pytest.fixture(scope="module")
def port(new_server: Callable[[], Any]) -> Iterator[int]:
    with new_server() as live:
        yield live.port


def exchange(port: int, request: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        with contextlib.suppress(ConnectionError):  # it may be refused before its end
            raw.sendall(request)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := raw.recv(65536):
                answer += chunk
                head, _, body = answer.partition(b"\r\n\r\n")
                if b"content-length" in head.lower() and _is_whole(head, body):
                    break
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(lines[0].split()[1]), headers, json.loads(body)


def _is_whole(head: bytes, body: bytes) -> bool:
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    return len(body) >= int(lengths[0].partition(b":")[2])


@pytest.mark.parametrize(
    ("status", "code", "request_bytes"),
    [
        (400, "invalid_http", b"GET / HTTP/9.9.9\r\n\r\n"),
        (400, "invalid_json", POST + JSON + b"Content-Length: 1\r\n\r\n{"),
        (404, "route_not_found", b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (405, "method_not_allowed", b"PUT /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (408, "request_timeout", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"),
        (408, "request_timeout", POST + JSON + b"Content-Length: 100\r\n\r\n{"),
        (413, "body_too_large", POST + JSON + b"Content-Length: 99999999999\r\n\r\n"),
        (415, "unsupported_media_type", POST + b"Content-Length: 2\r\n\r\n{}"),
        (
            421,
            "misdirected_request",
            b"GET /admin/placement HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        ),
        (403, "admin_disabled", b"GET /admin/placement HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (431, "headers_too_large", b"GET / HTTP/1.1\r\nx: " + b"a" * 700_000 + b"\r\n\r\n"),
    ],
)
def test_the_envelope(
    port: int, status: int, code: str, request_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if status == 408:  # here, and only here, the server waits for nobody for long
        monkeypatch.setattr(GuardedHttpToolsProtocol, "head_timeout_s", 0.3)
        monkeypatch.setattr(json_body, "BODY_TIMEOUT_S", 0.3)
    got, headers, body = exchange(port, request_bytes)
    assert (got, body["error"]["code"]) == (status, code)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"].startswith("req-")
    assert body["error"]["message"].endswith(".")


def test_401_on_a_socket(make_app: Any, start_live: Any) -> None:
    with start_live(make_app(api_keys=("one",))) as live:
        status, headers, body = exchange(
            live.port, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert headers["www-authenticate"] == "Bearer"
        assert exchange(live.port, POST + JSON + b"Content-Length: 1\r\n\r\n{")[0] == 400
