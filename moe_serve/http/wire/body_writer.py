"""Writes a part of an answer's body directly to the connection, past the middleware.

An ASGI message passes through every middleware, each of which awaits the next. For a stream of
tokens this costs as much as making the text. The middlewares only inspect the start and the end of
an answer, so the parts between may go straight to the connection while it has no backlog.
"""

from __future__ import annotations

import weakref

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_KEY = "moe_serve.body_writer"


class BodyWriter:
    """Writes the body of one answer whose start has been sent."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # weak: the cycle's scope refers to this object

    @property
    def is_open(self) -> bool:
        """True if parts can be written. Otherwise they must go as messages, which may wait for the
        reader."""
        cycle = self._cycle()
        return (
            cycle is not None
            and not cycle.disconnected
            and not cycle.flow.write_paused
            and not cycle.response_complete
            and cycle.chunked_encoding is True
        )

    def write(self, part: bytes) -> None:
        """Writes a part that is neither empty nor the end. Only allowed while the writer is
        open."""
        if (cycle := self._cycle()) is not None:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def offer_body_writer(scope: Scope, cycle: RequestResponseCycle) -> None:
    """Offers a writer to the application that answers the request."""
    scope.setdefault("extensions", {})[_KEY] = BodyWriter(cycle)


def body_writer_of(scope: Scope) -> BodyWriter | None:
    """Returns the writer of a request, or None if the server offers none."""
    writer: BodyWriter | None = scope.get("extensions", {}).get(_KEY)
    return writer
