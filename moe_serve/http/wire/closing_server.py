"""A uvicorn server that waits only for requests when it shuts down.

uvicorn gives connections some seconds to close by themselves. Over HTTPS closing needs an answer
from the client, and an idle client (such as a connection pool) does not read.
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from moe_serve.http.wire.sent_bytes import has_arrived

_LOOK_S = 0.1


class ClosingServer(uvicorn.Server):
    """On shutdown, it aborts connections that have sent everything."""

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
