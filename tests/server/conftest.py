"""Servers for the tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.server.server_process import ServerProcess


@pytest.fixture
def start_server() -> Iterator[Callable[..., ServerProcess]]:
    """Yields a function that starts servers with flags; all are stopped at the end."""
    started: list[ServerProcess] = []

    def start(*flags: str) -> ServerProcess:
        started.append(ServerProcess(*flags))
        return started[-1]

    yield start
    for server in started:
        server.stop()
