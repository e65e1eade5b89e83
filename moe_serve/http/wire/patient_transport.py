"""A TLS transport that closes only when the client has received all that was written.

TLS gives a client 30 s from `close` to the end of its closing message and of the answer before it.
The answer may take longer: it is written at once, whatever the client's speed, and data that is not
yet encrypted is not counted.
"""

from __future__ import annotations

import asyncio
from typing import Any

from moe_serve.http.wire.connection_guard import LEAST_TAKEN_BYTES
from moe_serve.http.wire.sent_bytes import has_arrived, num_arrived

_FIRST_LOOK_S = 0.01
_LAST_LOOK_S = 1.0  # each check waits twice as long as the one before, up to this time


class PatientTransport:
    """Wraps a transport and replaces `close`.

    A client that takes less than LEAST_TAKEN_BYTES in `timeout_s` is disconnected.
    """

    def __init__(
        self, wrapped: asyncio.Transport, loop: asyncio.AbstractEventLoop, timeout_s: float
    ) -> None:
        self._wrapped, self._loop, self._timeout_s = wrapped, loop, timeout_s
        self._is_closing = False
        self._had_arrived = True  # at the last check
        # when the client's current interval began, which ends at the deadline
        self._num_arrived = 0
        self._deadline = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def is_closing(self) -> bool:
        return self._is_closing or self._wrapped.is_closing()

    def close(self) -> None:
        if self._wrapped.is_closing():
            self._wrapped.close()
        elif not self._is_closing:
            self._is_closing = True
            self._num_arrived = num_arrived(self._wrapped)
            self._deadline = self._loop.time() + self._timeout_s
            self._look(_FIRST_LOOK_S)

    def _look(self, pause_s: float) -> None:
        if self._wrapped.is_closing():
            return  # the connection is gone
        had_arrived, self._had_arrived = self._had_arrived, has_arrived(self._wrapped)
        # twice in a row: the kernel may only have had room for more
        if had_arrived and self._had_arrived:
            self._wrapped.close()
            return
        now, arrived = self._loop.time(), num_arrived(self._wrapped)
        if arrived - self._num_arrived >= LEAST_TAKEN_BYTES:
            self._num_arrived, self._deadline = arrived, now + self._timeout_s
        if now >= self._deadline:
            self._wrapped.abort()
            return
        self._loop.call_later(pause_s, self._look, min(2 * pause_s, _LAST_LOOK_S))
