"""The outermost middleware: reports each request to the span export."""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_serve.http.generation.request_trace import RequestTrace, open_trace
from moe_serve.http.metrics.metrics import route_label
from moe_serve.http.tracing.spans import METHODS, ServedRequest, SpanExport

_LOGGER = logging.getLogger(__name__)
_UNTRACED = ("/health", "/metrics", "/ping", "/dashboard")  # polled every few seconds
_CONTEXT_HEADERS = ("traceparent", "tracestate")


class SpanMiddleware:
    """Exports spans of requests, except those of probes, Prometheus and the dashboard."""

    def __init__(self, app: ASGIApp, spans: SpanExport) -> None:
        self._app = app
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_UNTRACED):
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        start: Message = {}

        async def send_and_look(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            await send(message)

        with open_trace() as trace:
            try:
                await self._app(scope, receive, send_and_look)
            finally:
                self._export(scope, start, begun, trace)

    def _export(self, scope: Scope, start: Message, begun: float, trace: RequestTrace) -> None:
        """Exports one request. An error in tracing never affects the request."""
        headers = Headers(scope=scope)
        answered = Headers(raw=list(start.get("headers", ())))
        method = scope["method"] if scope["method"] in METHODS else "HTTP"
        request = ServedRequest(
            method=method,
            route=route_label(scope["path"]),
            status=start.get("status"),
            request_id=answered.get("x-request-id", ""),
            begun=begun,
            ended=time.monotonic(),
            trace_context={name: headers[name] for name in _CONTEXT_HEADERS if name in headers},
            sequences=tuple(trace.sequences),
        )
        try:
            self._spans.export(request)
        except Exception:  # a tracing library may raise anything
            _LOGGER.exception("the span of a request could not be exported")
