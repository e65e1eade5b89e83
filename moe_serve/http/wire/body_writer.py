"""Writing a part of an answer's body at once, past the layers that have nothing to do with it.

An ASGI message goes through every middleware, each of which awaits the next: for a stream of tokens
that is as much work as making the text. The layers look at an answer's start and end only, so what
lies between may go straight to the connection, where it can be taken at once.
"""

from __future__ import annotations

import weakref

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_KEY = "moe_serve.body_writer"


class BodyWriter:
    """Of one answer whose start has been sent."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # which has the scope that this is in

    @property
    def is_open(self) -> bool:
        """False: what is to be written goes as a message, which may wait for its reader."""
        cycle = self._cycle()
        return (
            cycle is not None
            and not cycle.disconnected
            and not cycle.flow.write_paused
            and not cycle.response_complete
            and cycle.chunked_encoding is True
        )

    def write(self, part: bytes) -> None:
        """Only while it is open. A part is not the end, and not empty."""
        if (cycle := self._cycle()) is not None:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def offer_body_writer(scope: Scope, cycle: RequestResponseCycle) -> None:
    """For the application that answers the request."""
    scope.setdefault("extensions", {})[_KEY] = BodyWriter(cycle)


def body_writer_of(scope: Scope) -> BodyWriter | None:
    """None: this server has none."""
    writer: BodyWriter | None = scope.get("extensions", {}).get(_KEY)
    return writer
