"""The outermost middleware: request id, HTTP metrics and access log, last error boundary."""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_serve.config.logs import current_request
from moe_serve.http.gate.access_log import AccessLog
from moe_serve.http.gate.pace import Pace
from moe_serve.http.metrics.metrics import ServerMetrics
from moe_serve.http.schema.errors import internal_error

_LOGGER = logging.getLogger(__name__)
_MAX_REQUEST_ID_CHARS = 128


class EdgeMiddleware:
    """Echoes the client's X-Request-Id (or creates one) and turns unknown exceptions into a 500.

    The client's id is only echoed and logged; it is never used for a lookup.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, access: AccessLog) -> None:
        self._app = app
        self._metrics, self._access = metrics, access
        self._pace = Pace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, begun = request_id_of(Headers(scope=scope)), time.monotonic()
        status: int | None = None
        token = current_request.set(request_id)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            if not is_health_path(scope["path"]):
                await self._pace.turn()
            await self._app(scope, receive, send_with_id)
        except Exception:  # the top of a request: the server continues after any error
            _LOGGER.exception("request %s failed: %r", request_id, scope["path"][:200])
            if status is None:
                await internal_error().response(scope["path"])(scope, receive, send_with_id)
        finally:
            seconds = time.monotonic() - begun
            self._metrics.count_http_request(scope["path"], status, seconds)
            self._access.note(scope["method"], scope["path"], status, seconds, request_id)
            current_request.reset(token)


def is_health_path(path: str) -> bool:
    """True for health checks, which are never delayed."""
    return path.startswith("/health") or path == "/ping"


def request_id_of(headers: Headers) -> str:
    """The client's id if it is short and printable, else a new one."""
    given = headers.get("x-request-id", "")
    is_usable = given.isascii() and given.isprintable() and len(given) <= _MAX_REQUEST_ID_CHARS
    return given if given and is_usable else f"req-{uuid.uuid4().hex}"
