"""Serves the loading application on the same socket while the main thread loads the model."""

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
_LAST_REQUEST_S = 1.0  # for clients that have connected, but not yet sent a request


class LoadingServer:
    """Serves inside its `with` block, on its own thread.

    The listener itself stays open: clients that connect between this server and the next wait in
    its queue.
    """

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
    """Answers connections that were accepted before the end, instead of aborting them."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()  # accepts no more connections
        deadline = time.monotonic() + _LAST_REQUEST_S
        # a connection accepted just now is known after one turn of the loop
        await asyncio.sleep(_POLL_S)
        while time.monotonic() < deadline and self._has_silent:
            await asyncio.sleep(_POLL_S)
        await super().shutdown(sockets)

    @property
    def _has_silent(self) -> bool:
        return any(
            isinstance(connection, GuardedHttpToolsProtocol) and connection.cycle is None
            for connection in self.server_state.connections
        )
