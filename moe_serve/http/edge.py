"""The outermost middleware: request id, HTTP metrics and access log, last error boundary.

The access log has one line for each request, without headers, bodies and query strings.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_serve.config.logs import ACCESS_LOG, current_request
from moe_serve.http.metrics.metrics import ServerMetrics
from moe_serve.http.schema.api_error import internal_error

_ACCESS_LOGGER = logging.getLogger(ACCESS_LOG)
_MAX_PATH_CHARS = 200


class AccessLog:
    """Writes the access log. Paths that start with an entry of `exclude`, such as probes, get no
    line."""

    def __init__(self, exclude: Sequence[str]) -> None:
        self._exclude = tuple(exclude)

    def note(
        self, method: str, path: str, status: int | None, seconds: float, request_id: str
    ) -> None:
        """Logs one request. `status` None: the client disconnected before an answer."""
        if not _ACCESS_LOGGER.isEnabledFor(logging.INFO) or path.startswith(self._exclude):
            return
        shown = path[:_MAX_PATH_CHARS].encode("unicode_escape").decode()
        fields = {
            "method": method[:20],
            "path": shown,
            "status": status,
            "seconds": round(seconds, 4),
            "request_id": request_id,
        }
        _ACCESS_LOGGER.info(
            "%s %s %s %.4f s %s",
            fields["method"],
            shown,
            "-" if status is None else status,
            seconds,
            request_id,
            extra={"fields": fields},
        )


_LOGGER = logging.getLogger(__name__)
_MAX_REQUEST_ID_CHARS = 128
PER_TURN = 2


class Pace:
    """Limits how many requests start in one turn of the event loop.

    Starting a request (JSON, checks, tokens) is a millisecond of uninterrupted work. If hundreds
    arrived together and started in the same turn, every stream would stall meanwhile. So a few
    start, the loop runs once, then the next few start, in the order of arrival. Used on the event
    loop's thread only. With a new loop, after the old one has ended, it starts over.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_begun = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Waits until the caller may start."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the old loop will never run its pending calls
            self._loop, self._num_begun, self._waiting = loop, 0, deque()
        if self._num_begun == 0:
            loop.call_soon(self._next_turn)
        if self._num_begun < PER_TURN and not self._waiting:
            self._num_begun += 1
            return
        self._num_begun = max(self._num_begun, 1)
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next_turn(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < PER_TURN:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its client is still connected
                waiter.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            asyncio.get_running_loop().call_soon(self._next_turn)


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
    """Returns True for health checks, which are never delayed."""
    return path.startswith("/health") or path == "/ping"


def request_id_of(headers: Headers) -> str:
    """Returns the client's id if it is short and printable, else a new one."""
    given = headers.get("x-request-id", "")
    is_usable = given.isascii() and given.isprintable() and len(given) <= _MAX_REQUEST_ID_CHARS
    return given if given and is_usable else f"req-{uuid.uuid4().hex}"
