"""uvicorn's server, whose end waits for requests and for nothing else.

uvicorn gives connections some seconds to close by themselves. Over HTTPS that takes an answer of
the client, and one that is idle (any pool of connections) does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import termios

import uvicorn

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
                if transport.is_closing() and _has_arrived(transport):
                    transport.abort()


def _has_arrived(transport: asyncio.Transport) -> bool:
    """Whether the client's machine has all that was written; False where that is not told."""
    connected: socket.socket | None = transport.get_extra_info("socket")
    if connected is None:  # it is gone, of which its protocol will be told in the loop's next turn
        return False
    unsent = bytearray(4)
    with contextlib.suppress(OSError, ValueError):
        fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, unsent)
        return not any(unsent) and not transport.get_write_buffer_size()
    return False
