"""One real server for all tests; after each it must be unharmed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.security.real_server import RealServer, running


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RealServer]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared_server: RealServer) -> Iterator[RealServer]:
    """The shared server. After each test that uses it, the next client must find everything
    unchanged."""
    yield shared_server
    shared_server.check_unharmed()
