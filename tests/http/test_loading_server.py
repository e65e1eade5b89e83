"""The port while the model loads: it is alive, shows the progress, and serves nothing else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.config.sections import ServerConfig
from moe_serve.engine.memory.memory_plan import MemoryPlan, ProcessMemory, Room
from moe_serve.engine.watch.startup import Startup
from moe_serve.errors import ConfigError
from moe_serve.http import loading as loading_server
from moe_serve.http.loading import LoadingServer, loading_app
from moe_serve.http.server import DrainingServer, bind

PROCESS = ProcessMemory(name="server", device="cpu", weights=7, kv_bytes=3, num_pages=2)
PLAN = MemoryPlan(processes=(PROCESS,), rooms=(Room(name="this", free=20, users=("server",)),))


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_what_is_answered_while_loading() -> None:
    startup = Startup()
    startup.plan = PLAN
    startup.begin("loading")
    startup.note_progress(12, 40)
    with (
        bind("127.0.0.1", 0) as listener,
        LoadingServer(listener, ServerConfig(), startup),
        httpx.Client(base_url=url_of(listener), trust_env=False) as client,
    ):
        live = client.get("/health/live")
        assert live.status_code == 200 and live.json()["phase"] == "loading"
        for method, path in (
            ("GET", "/health/ready"),
            ("GET", "/health"),
            ("GET", "/ping"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/nowhere"),
        ):
            response = client.request(method, path, headers={"X-Request-Id": "r1"})
            assert response.status_code == 503, path
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("loading", "server_error")
            assert "loading, 12 of 40 tensors after" in error["message"]
            assert int(response.headers["retry-after"]) >= 1
            assert response.headers["x-request-id"] == "r1"
        anthropic = client.post("/v1/messages").json()
        assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "overloaded_error")
        shown = client.get("/startup").json()
        assert shown["phase"] == "loading"
        assert [phase["name"] for phase in shown["phases"]] == ["checking", "loading"]
        assert shown["phases"][1]["done"] == 12 and shown["phases"][1]["total"] == 40
        assert shown["memory"]["processes"][0]["total"] == 10
        assert shown["memory"]["rooms"][0]["needed"] == 10


def test_keys_are_asked_for_while_loading() -> None:
    config = ServerConfig(api_keys=("one",))
    with (
        bind("127.0.0.1", 0) as listener,
        LoadingServer(listener, config, Startup()),
        httpx.Client(base_url=url_of(listener), trust_env=False) as client,
    ):
        assert client.get("/startup").status_code == 401
        assert client.get("/v1/models").status_code == 401
        assert client.get("/health/ready").status_code == 503
        headers = {"Authorization": "Bearer one"}
        assert client.get("/startup", headers=headers).status_code == 200
        assert client.get("/admin/hang", headers=headers).status_code == 403


def test_web_pages_may_read_that_it_is_loading() -> None:
    origin = {"Origin": "https://chat.example.com"}
    config = ServerConfig(api_keys=("secret",), cors_origins=("https://chat.example.com",))
    client = TestClient(loading_app(config, Startup()))
    refused = client.post("/v1/completions", headers=origin | {"X-Api-Key": "secret"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
    assert refused.headers["access-control-allow-origin"] == origin["Origin"]
    asked = client.options("/v1/models", headers=origin | {"Access-Control-Request-Method": "GET"})
    assert asked.status_code == 200
    plain = TestClient(loading_app(ServerConfig(), Startup()))
    assert "access-control-allow-origin" not in plain.get("/health/live", headers=origin).headers


def test_the_port_is_never_closed_between_the_servers(
    make_app: Callable[..., FastAPI], engine: Any
) -> None:
    """A client that polls sees 503, then 200, and no refused connection."""
    config, seen, has_ended = ServerConfig(), list[int](), threading.Event()
    listener = bind("127.0.0.1", 0)
    url = url_of(listener)

    def ask() -> None:
        while not has_ended.is_set():
            answer = httpx.get(f"{url}/health", trust_env=False, timeout=60)
            seen.append(answer.status_code)
            if answer.status_code == 200:
                has_ended.set()

    asking = threading.Thread(target=ask)
    with LoadingServer(listener, config, Startup()):
        asking.start()
        while len(seen) < 3:
            assert asking.is_alive()
            time.sleep(0.01)
    server = DrainingServer(make_app(), engine, config)
    serving = threading.Thread(target=server.run, args=([listener],))
    serving.start()
    try:
        assert has_ended.wait(60), f"never ready: {seen[-3:]}"
    finally:
        has_ended.set()
        asking.join(60)
        assert server._loop is not None
        server._loop.call_soon_threadsafe(server.begin_shutdown)
        serving.join(60)
    assert set(seen) == {503, 200} and seen == sorted(seen, reverse=True)


def test_who_was_let_in_is_answered_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client connects while the model loads and sends its request afterwards."""
    monkeypatch.setattr(loading_server, "_LAST_REQUEST_S", 60.0)
    with bind("127.0.0.1", 0) as listener:
        loading = LoadingServer(listener, ServerConfig(), Startup())
        loading.__enter__()
        with socket.create_connection(listener.getsockname(), timeout=60) as raw:
            while not loading._server.server_state.connections:
                time.sleep(0.01)
            ending = threading.Thread(target=loading.__exit__)
            ending.start()
            while not loading._server.should_exit:
                time.sleep(0.01)
            raw.sendall(b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while chunk := raw.recv(65536):
                answer += chunk
        ending.join(60)
        assert not ending.is_alive()
    assert answer.startswith(b"HTTP/1.1 503") and b"connection: close" in answer.lower()


def test_what_is_wrong_with_files_is_said_at_once(tmp_path: Path) -> None:
    for config in (
        ServerConfig(api_key_file=str(tmp_path / "none")),
        ServerConfig(ssl_certfile=str(tmp_path / "none")),
    ):
        with bind("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match="none"):
            LoadingServer(listener, config, Startup())


def test_phases_end_in_order() -> None:
    startup = Startup()
    for name in ("loading", "preparing", "ready"):
        startup.begin(name)  # type: ignore[arg-type]
    assert [phase.name for phase in startup.phases] == ["checking", "loading", "preparing", "ready"]
    assert startup.phases[-1].seconds == 0.0
