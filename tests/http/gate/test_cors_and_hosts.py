"""Web pages of other origins, and pages whose host name resolves to our address."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.config.sections import ServerConfig
from moe_serve.http.gate.origins import COUNTS, host_name, is_loopback_name

MakeApp = Callable[..., FastAPI]
PAGE = "https://chat.example.com"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def cors_headers(response: Any) -> dict[str, str]:
    return {k: v for k, v in response.headers.items() if k.startswith("access-control-")}


def test_no_cors_by_default(make_app: MakeApp) -> None:
    client = TestClient(make_app())
    for method, path in (("GET", "/v1/models"), ("OPTIONS", "/v1/completions"), ("GET", "/x")):
        assert cors_headers(client.request(method, path, headers=PREFLIGHT)) == {}


def test_a_configured_page_may_call(make_app: MakeApp) -> None:
    client = TestClient(make_app(api_keys=("one",), cors_origins=(PAGE,)))
    preflight = client.options("/v1/completions", headers=PREFLIGHT)
    assert preflight.status_code == 200, "a browser sends no key with it"
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-credentials" not in preflight.headers
    headers = {"Origin": PAGE, "Authorization": "Bearer one"}
    answer = client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    refused = client.post("/v1/completions", json={"prompt": "hi"}, headers={"Origin": PAGE})
    assert refused.status_code == 401, "also with the header, so that the page can read why"
    assert refused.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize(
    "change", [{"Origin": "https://evil.example"}, {"Access-Control-Request-Method": "PATCH"}]
)
def test_others_get_the_envelope(make_app: MakeApp, change: dict[str, str]) -> None:
    client = TestClient(make_app(cors_origins=(PAGE,)))
    response = client.options("/v1/completions", headers={**PREFLIGHT, **change})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "cors_refused"
    assert cors_headers(response) == {}
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("host", "name", "is_own"),
    [
        ("localhost:8000", "localhost", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.9.8.7:1", "127.9.8.7", True),
        ("[::1]:8000", "::1", True),
        ("[::ffff:127.0.0.1]", "::ffff:127.0.0.1", True),
        ("LOCALHOST.:80", "localhost", True),
        ("evil.example:8000", "evil.example", False),
        ("127.0.0.1.evil.example", "127.0.0.1.evil.example", False),
        ("10.0.0.1", "10.0.0.1", False),
        ("", "", False),
    ],
)
def test_names_of_this_machine(host: str, name: str, is_own: bool) -> None:
    assert host_name(host) == name
    assert is_loopback_name(name) is is_own


def status_of(port: int, path: str, host: str) -> int:
    url = f"http://127.0.0.1:{port}{path}"
    return httpx.get(url, headers={"Host": host}, trust_env=False).status_code


def ask(port: int, path: str, host: str, more: str = "") -> tuple[int, Any]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more}\r\n"
        raw.sendall(head.encode())
        answer = b""
        while chunk := raw.recv(65536):
            answer += chunk
    head_bytes, _, body = answer.partition(b"\r\n\r\n")
    return int(head_bytes.split()[1]), json.loads(body)


def test_a_foreign_host_over_loopback(
    make_app: MakeApp, start_live: Callable[[FastAPI], Any]
) -> None:
    key = "Authorization: Bearer boss\r\n"
    app = make_app(admin_keys=("boss",), allowed_hosts=("proxy.example",))
    with start_live(app) as live:
        status, body = ask(live.port, "/admin/placement", "evil.example", key)
        assert (status, body["error"]["code"]) == (421, "misdirected_request")
        assert "'evil.example'" in body["error"]["message"]
        for host in ("localhost", f"127.0.0.1:{live.port}", "Proxy.example:80"):
            assert ask(live.port, "/admin/placement", host, key)[0] == 409, "no ranks here"
        origin = "Origin: http://evil.example\r\n"
        assert ask(live.port, "/v1/models", "evil.example", origin)[0] == 421
        assert ask(live.port, "/v1/models", "evil.example")[0] == 200, "no page asks"
        for path in sorted(COUNTS):
            assert ask(live.port, path, "evil.example")[0] == 421, path
            for host in (
                f"localhost:{live.port}", "127.0.0.1:9", "[::1]", "proxy.example",
                "moe.localhost", "host.docker.internal:8000",
            ):  # fmt: skip
                assert status_of(live.port, path, host) == 200, (path, host)
        assert ask(live.port, "/v1/models", "localhost", origin)[0] == 200
        assert ask(live.port, "/health/live", "evil.example")[0] == 200


def test_a_key_is_enough_where_there_are_keys(
    make_app: MakeApp, start_live: Callable[[FastAPI], Any]
) -> None:
    more = "Origin: http://page.example\r\nAuthorization: Bearer one\r\n"
    with start_live(make_app(api_keys=("one",))) as live:
        assert ask(live.port, "/v1/models", "page.example", more)[0] == 200
        assert ask(live.port, "/load", "page.example", more)[0] == 200


def test_the_defaults_are_closed() -> None:
    config = ServerConfig()
    assert config.host == "127.0.0.1" and not config.allow_open
    assert config.cors_origins == () and config.allowed_hosts == ()
