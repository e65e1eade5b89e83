"""Ten thousand odd paths, methods and names; bytes that are no HTTP; contents of errors."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import random
import socket
import string
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from moe_serve.cli.serve.serve import check_is_guarded
from moe_serve.config.sections import ServerConfig
from moe_serve.errors import ConfigError
from moe_serve.http.app import create_app
from tests.support.sampled_cases import EVERY_CASE
from tests.support.security.real_server import BOTH, TEXT, RealServer, refused

NUM_ODD = 10_000 if EVERY_CASE else 2000


def pickle_that_writes(path: Path) -> bytes:
    """Returns `builtins.open(path, "w")` as a pickle, written by hand."""
    return b"\x80\x04cbuiltins\nopen\n(V" + str(path).encode() + b"\nVw\ntR."


async def ask_oddly(app: Any, method: str, path: str, body: bytes) -> int:
    """Sends one request straight into the application, without a socket, so that ten thousand are
    quick."""
    statuses: list[int] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": [(b"content-type", b"application/json")],
        "root_path": "", "scheme": "http", "http_version": "1.1",
    }  # fmt: skip
    await app(scope, receive, send)
    return statuses[0]


def series(text: str) -> list[str]:
    return [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]


def test_odd_paths_leave_metrics_as_they_are(server: RealServer) -> None:
    """PYSEC-2026-4325: paths, methods and model names of clients are no labels."""
    rng = random.Random(2)
    letters = string.ascii_letters + string.digits + '/%.~ü\x00\n"{}'

    def word() -> str:
        return "".join(rng.choice(letters) for _ in range(rng.randint(1, 40)))

    async def ask(count: int) -> set[int]:
        seen = set()
        for i in range(count):
            path = ("/", "/v1/models/", "/admin/", "/health/")[i % 4] + word()
            method = rng.choice(["GET", "POST", "DELETE", word(), "get", "TRACE"])
            seen.add(await ask_oddly(server.app, method, path, b""))
        for _ in range(count // 50):
            body = b'{"prompt": "hi", "model": "%s"}' % word().encode().hex().encode()
            seen.add(await ask_oddly(server.app, "POST", TEXT, body))
        return seen

    asyncio.run(ask(500))  # every route with every status
    server.client.get("/metrics")
    before = server.client.get("/metrics").text
    assert asyncio.run(ask(NUM_ODD)) <= {404, 405, 403}
    after = server.client.get("/metrics").text
    assert series(after) == series(before)
    assert len(after) - len(before) < 400, "digits of counters, no more"


def test_a_pickle_at_the_http_port_runs_nothing(server: RealServer, tmp_path: Path) -> None:
    """CVE-2025-32444, CVE-2024-9053, CVE-2025-66455 and others: no port loads what it is sent."""
    made = tmp_path / "made"
    payload = pickle_that_writes(made)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
        raw.sendall(payload + b"\r\n\r\n")
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := raw.recv(4096):
                answer += chunk
    assert answer.startswith(b"HTTP/1.1 400 ")
    for route in BOTH:
        refused(server.post_raw(route, payload), 400)
    for kind in ("application/octet-stream", "application/x-python-pickle", "multipart/form-data"):
        response = server.client.post(TEXT, content=payload, headers={"content-type": kind})
        refused(response, 415)
    assert not made.exists()


def test_errors_tell_nothing_of_the_inside(server: RealServer) -> None:
    """CVE-2025-23310, CVE-2025-23317, CVE-2025-23319, CVE-2025-23320, CVE-2025-23334: names of
    files, memory or modules in an error are the first step of an attack."""
    for raw in (b"", b"{", b"[]", b"\xff", b'{"prompt": 1}', b'{"prompt": "a", "n": {}}'):
        for route in BOTH:
            refused(server.post_raw(route, raw), 400)
    refused(server.client.get("/v1/models/../../etc/passwd"), 404)
    refused(server.client.get("/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd"), 404)
    refused(server.client.post(TEXT, json={"prompt": "a", "model": "/etc/passwd"}), 404)
    refused(server.client.post(TEXT, json={"prompt": "a", "model": "x" * 100_000}), 404)
    refused(server.client.post(TEXT, json={"prompt": "a", "max_tokens": 10**6}), 400)
    refused(server.client.post(TEXT, json={"prompt": "a" * 3_000_000}), 400)
    refused(server.client.post(TEXT, content=b" " * 5_000_000,
                               headers={"content-type": "application/json"}), 413)  # fmt: skip


def test_no_range_and_no_multipart(server: RealServer) -> None:
    """CVE-2025-62727 (Range of Starlette), CVE-2026-42561, CVE-2024-24762 (multipart)."""
    version = tuple(int(part) for part in importlib.metadata.version("starlette").split(".")[:3])
    assert version >= (0, 49, 1)
    assert not {"multipart", "python_multipart"} & set(sys.modules), "a parser that nobody needs"
    ranges = "bytes=" + ",".join(f"{i}-{i + 1}" for i in range(4000))
    for path in ("/v1/models", "/metrics", "/openapi.json", "/health/live"):
        response = server.client.get(path, headers={"range": ranges})
        assert response.status_code == 200 and "content-range" not in response.headers


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/nothing"])
def test_keys_of_every_length_are_compared_in_full(server: RealServer, path: str) -> None:
    """CVE-2025-59425, CVE-2026-23996: a key is wrong as a whole, even if it begins like a right
    one."""
    key = "k" * 40
    client = TestClient(create_app(server.engine, server.model, ServerConfig(api_keys=(key,))))
    for wrong in ("", "k", key[:-1], key + "k", key.upper(), key + " k", "\x00", "k" * 100_000):
        response = client.get(path, headers={"authorization": b"Bearer " + wrong.encode()})
        assert response.status_code == 401, wrong
        assert key not in response.text
    assert client.get(path, headers={"authorization": f"Bearer {key}"}).status_code != 401
    assert client.get("/health/live").status_code == 200


def test_other_machines_need_a_key() -> None:
    """CVE-2023-48022, CVE-2025-62593 (Ray's open job API): without a key only loopback."""
    for host in ("0.0.0.0", "::", "192.0.2.7", "example.org", ""):
        with pytest.raises(ConfigError, match="no API key is set"):
            check_is_guarded(ServerConfig(host=host))
        check_is_guarded(ServerConfig(host=host, api_keys=("k",)))
    for host in ("127.0.0.1", "::1", "localhost"):
        check_is_guarded(ServerConfig(host=host))


def test_a_connection_that_dies_in_its_body_leaves_nothing(server: RealServer) -> None:
    """CVE-2026-110807, CVE-2026-110809, CVE-2026-109225, CVE-2026-100650: a Content-Length that
    lies, an upload that stops, chunks that are no chunks."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    tails = (
        b"Content-Length: 4000000\r\n\r\n{",
        b"Content-Length: -1\r\n\r\n{}",
        b"Content-Length: 5\r\nContent-Length: 50\r\n\r\n{}",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}",
        b"Content-Length: 99999999999999999999999\r\n\r\n",
        b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n",
    )
    for tail in tails:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
            raw.sendall(head + tail)
            raw.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while chunk := raw.recv(4096):
                    answer += chunk
        assert not answer or answer.startswith(b"HTTP/1.1 4") or b"100 Continue" in answer, answer
