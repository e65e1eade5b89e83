"""Our uvicorn server: its configuration, and a shutdown that waits only for requests."""

from __future__ import annotations

import asyncio
import socket
import ssl

import uvicorn
from starlette.types import ASGIApp

from moe_serve.http.wire.httptools_protocol import GuardedHttpToolsProtocol
from moe_serve.http.wire.tls import Tls
from moe_serve.http.wire.transports import has_arrived

CUT_GRACE_S = 5  # seconds for error events to reach their clients
_KEEP_ALIVE_S = 65  # seconds, longer than the idle time of usual client pools and load balancers
_LOOK_S = 0.1


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


class ClosingServer(uvicorn.Server):
    """A uvicorn server that waits only for requests when it shuts down.

    uvicorn gives connections some seconds to close by themselves. Over HTTPS closing needs an
    answer from the client, and an idle client (such as a connection pool) does not read. So
    connections that have sent everything are aborted.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        # Connections and tasks wait for requests. The listeners' own count (from Python 3.12 on,
        # without uvloop) also contains connections whose TLS handshake never ends.
        self.servers = []
        cutting = asyncio.create_task(self._cut_silent_connections())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut_silent_connections(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for connection in list(self.server_state.connections):
                transport = connection.transport
                if transport.is_closing() and has_arrived(transport):
                    transport.abort()
