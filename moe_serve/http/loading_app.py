"""Answers requests before the model is loaded: liveness and the progress of the start."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_serve.config.sections import ServerConfig
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.admin.startup_routes import startup_json
from moe_serve.http.edge import request_id_of
from moe_serve.http.gate.auth import ApiKeyMiddleware
from moe_serve.http.gate.cors import ConfiguredCors
from moe_serve.http.gate.host_check import HostMiddleware
from moe_serve.http.gate.key_ring import KeyRing
from moe_serve.http.schema.errors import ApiError, retry_headers

_RETRY_S = 2.0


def loading_app(config: ServerConfig, startup: Startup) -> ASGIApp:
    """The application for the time of loading, with the same checks of keys and hosts as the real
    one."""
    keys, admin_keys = KeyRing(config.api_keys, config.api_key_file), KeyRing(config.admin_keys)
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
