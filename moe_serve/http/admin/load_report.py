"""The `endpoint-load-metrics` header of answers reports the server's load to balancers (ORCA).

A client asks with `endpoint-load-metrics-format: TEXT` or `JSON`, and gets vLLM's two values:

    endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.…=3.0
    endpoint-load-metrics: JSON {"named_metrics":{"kv_cache_usage_perc":0.25,…}}

A streamed answer has the load at its start, a complete one the load at its end.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_serve.engine.request.stats import EngineStats

FORMATS = frozenset({"text", "json"})
_ASKED = "endpoint-load-metrics-format"
_TOLD = "endpoint-load-metrics"
_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations"}
)


class LoadReportMiddleware:
    """Adds the header to the answers of generating routes, if the client asks for it."""

    def __init__(self, app: ASGIApp, stats: Callable[[], EngineStats]) -> None:
        self._app, self._stats = app, stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get(_ASKED, "").strip().lower()
        if wanted not in FORMATS:
            await self._app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                MutableHeaders(scope=message)[_TOLD] = load_report(self._stats(), wanted)
            await send(message)

        await self._app(scope, receive, send_with_load)


def load_report(stats: EngineStats, wanted: str) -> str:
    """The value of the header in one of `FORMATS`."""
    metrics = {
        "kv_cache_usage_perc": stats.load.used_share,
        "num_requests_waiting": float(stats.load.num_waiting),
    }
    if wanted == "json":
        return f"JSON {msgspec.json.encode({'named_metrics': metrics}).decode()}"
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
