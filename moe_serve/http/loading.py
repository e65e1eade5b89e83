"""Answers requests while the model is loading: liveness and the progress of the start.

The loading server runs on its own thread and on the socket of the server that follows it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_serve.config.sections import DEFAULT_SCHEDULER, SchedulerConfig, ServerConfig
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.admin.status import startup_json
from moe_serve.http.edge import request_id_of
from moe_serve.http.gate.auth import ApiKeyMiddleware, KeyRing, api_keys
from moe_serve.http.gate.origins import ConfiguredCors, HostMiddleware
from moe_serve.http.schema.api_error import ApiError, retry_headers
from moe_serve.http.wire.httptools_protocol import GuardedHttpToolsProtocol
from moe_serve.http.wire.uvicorn_server import ClosingServer, Tls, uvicorn_config

_RETRY_S = 2.0


def loading_app(
    config: ServerConfig, startup: Startup, scheduler: SchedulerConfig = DEFAULT_SCHEDULER
) -> ASGIApp:
    """Returns the application for the time of loading, with the same checks of keys and hosts as
    the real one."""
    keys, admin_keys = api_keys(config, scheduler), KeyRing(config.admin_keys)
    guarded = ApiKeyMiddleware(_LoadingApp(startup), keys, admin_keys)
    app: ASGIApp = HostMiddleware(guarded, config.allowed_hosts, has_keys=config.has_api_keys)
    if config.cors_origins:  # a page can only wait for an answer that it may read
        app = ConfiguredCors(app, config.cors_origins)
    return _RequestIds(app)


class _RequestIds:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(Headers(scope=scope))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                headers["Connection"] = "close"  # the next request goes to the real server
            await send(message)

        await self._app(scope, receive, send_with_id)


class _LoadingApp:
    def __init__(self, startup: Startup) -> None:
        self._startup = startup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope["path"])(scope, receive, send)

    def _answer(self, path: str) -> Response:
        if path == "/health/live":
            return JSONResponse({"status": "live", "phase": self._startup.phases[-1].name})
        if path == "/startup":
            return JSONResponse(startup_json(self._startup))
        phase = self._startup.phases[-1]
        error = ApiError(
            503,
            f"The server is starting: {phase}.",
            code="loading",
            headers={**retry_headers(_RETRY_S), "x-should-retry": "true"},
        )
        return error.response(path)


_POLL_S = 0.01
_START_TIMEOUT_S = 60.0
_LAST_REQUEST_S = 1.0  # time for clients that have connected but not yet sent a request


class LoadingServer:
    """Serves inside its `with` block, on its own thread.

    The listener itself stays open: clients that connect between this server and the next wait in
    its queue.
    """

    def __init__(
        self,
        listener: socket.socket,
        config: ServerConfig,
        startup: Startup,
        scheduler: SchedulerConfig = DEFAULT_SCHEDULER,
    ) -> None:
        app = loading_app(config, startup, scheduler)
        self._server = _Server(uvicorn_config(app, Tls.of(config)))
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
        # a connection that has just been accepted is known after one turn of the loop
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
