"""The uvicorn configuration: our protocol with limits, TLS as configured, no logs of its own."""

from __future__ import annotations

import ssl

import uvicorn
from starlette.types import ASGIApp

from moe_serve.http.wire.httptools_protocol import GuardedHttpToolsProtocol
from moe_serve.http.wire.tls import Tls

CUT_GRACE_S = 5  # seconds for error events to reach their clients
_KEEP_ALIVE_S = 65  # seconds, longer than the idle time of usual client pools and load balancers


def uvicorn_config(app: ASGIApp, tls: Tls | None) -> uvicorn.Config:
    """`tls` None: plain HTTP."""

    def context(*_: object) -> ssl.SSLContext:
        assert tls is not None, "TLS is configured"
        return tls.context

    return uvicorn.Config(
        app,
        loop="auto",  # uvloop if it is installed
        http=GuardedHttpToolsProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=CUT_GRACE_S,
        ssl_context_factory=None if tls is None else context,
    )
