"""uvicorn's h11 protocol with the limits of `connection_guard`; for where httptools is missing.

h11 itself refuses a head that is larger than `h11_max_incomplete_event_size`.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moe_serve.http.connection_guard import (
    HEAD_TIMEOUT_S,
    MAX_HEAD_BYTES,
    WRITE_TIMEOUT_S,
    ConnectionGuard,
    large_head_error,
    late_head_error,
    malformed_error,
)


class GuardedH11Protocol(H11Protocol):
    """h11's state of the client is IDLE until a head is complete."""

    head_timeout_s: ClassVar[float] = HEAD_TIMEOUT_S
    write_timeout_s: ClassVar[float] = WRITE_TIMEOUT_S

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._guard = ConnectionGuard(
            self.loop,
            self._end_late_head,
            head_timeout_s=self.head_timeout_s,
            write_timeout_s=self.write_timeout_s,
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._guard.open(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._guard.is_refused:
            super().data_received(data)

    def handle_events(self) -> None:
        """After new bytes, and after an answer, when those of the next request may lie ready."""
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._guard.end_head()
        elif self._num_pending_bytes:
            self._guard.begin_head()

    def send_400_response(self, msg: str) -> None:
        self._unset_keepalive_if_required()
        if self._is_answering:  # nothing can be said in the middle of an answer
            self.transport.close()
            return
        is_large = self._num_pending_bytes > MAX_HEAD_BYTES
        error = large_head_error() if is_large else malformed_error()
        self._guard.refuse(error, self.server_state.default_headers)

    def pause_writing(self) -> None:
        self._guard.stall_writing()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._guard.resume_writing()
        super().resume_writing()

    @property
    def _num_pending_bytes(self) -> int:
        return len(self.conn.trailing_data[0])

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_late_head(self) -> None:
        if self._is_answering:  # it is the answer that keeps the connection open
            self._guard.begin_head()
        elif self._num_pending_bytes:
            self._guard.refuse(late_head_error(), self.server_state.default_headers)
        else:
            self.transport.close()
