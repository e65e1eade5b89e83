"""Serves the loading application while the main thread loads the model, on the same socket."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

from moe_serve.config.sections import ServerConfig
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.loading_app import loading_app
from moe_serve.http.wire.closing_server import ClosingServer
from moe_serve.http.wire.httptools_protocol import GuardedHttpToolsProtocol
from moe_serve.http.wire.tls import Tls
from moe_serve.http.wire.uvicorn_config import uvicorn_config

_POLL_S = 0.01
_START_TIMEOUT_S = 60.0
_LAST_REQUEST_S = 1.0  # for who has connected and not asked yet


class LoadingServer:
    """From `with` to its end, on a thread of its own. The listener itself stays open: who connects
    between this server and the next waits in its queue."""

    def __init__(self, listener: socket.socket, config: ServerConfig, startup: Startup) -> None:
        self._server = _Server(uvicorn_config(loading_app(config, startup), Tls.of(config)))
        self._socket = listener.dup()
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="loading-server", daemon=True
        )

    def __enter__(self) -> LoadingServer:
        self._thread.start()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started and self._thread.is_alive():
            assert time.monotonic() < deadline, f"no loading server after {_START_TIMEOUT_S:g} s"
            time.sleep(_POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


class _Server(ClosingServer):
    """Except that who was let in before the end is answered, and not cut."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()  # nobody else is let in
        deadline = time.monotonic() + _LAST_REQUEST_S
        await asyncio.sleep(_POLL_S)  # who was let in just now is known after a turn of the loop
        while time.monotonic() < deadline and self._has_silent:
            await asyncio.sleep(_POLL_S)
        await super().shutdown(sockets)

    @property
    def _has_silent(self) -> bool:
        return any(
            isinstance(connection, GuardedHttpToolsProtocol) and connection.cycle is None
            for connection in self.server_state.connections
        )
