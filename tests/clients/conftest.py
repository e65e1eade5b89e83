"""One server for all client tests, and no other network."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server.server_process import ServerProcess


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    server = ServerProcess()
    yield server.url
    server.stop()


@pytest.fixture
def base_url(server_url: str) -> str:
    return f"{server_url}/v1"


@pytest.fixture
def http_client() -> Iterator[httpx.Client]:
    """A client for the libraries that do not close theirs; the fixture closes it."""
    with httpx.Client(timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """These libraries must not fetch vocabularies or report usage."""
    real = socket.getaddrinfo

    def only_local(host: Any, *arguments: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        assert name in ("127.0.0.1", "localhost", None), f"a client asked for {name}"
        return real(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", only_local)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
