"""uvicorn's server, whose end waits for requests and for nothing else.

uvicorn gives connections some seconds to close by themselves. Over HTTPS that takes an answer of
the client, and one that is idle (any pool of connections) does not read.
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from moe_serve.http.wire.sent_bytes import has_arrived

_LOOK_S = 0.1


class ClosingServer(uvicorn.Server):
    """At its end, connections on which everything has been said are cut."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        # Requests are waited for by their connections and tasks. The listeners' own count has (from
        # Python 3.12 on, without uvloop) those in it whose TLS handshake never ends.
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
