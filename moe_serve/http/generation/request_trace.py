"""What belongs to the HTTP request at hand, for those who tell of it afterwards.

A server that makes traces opens one for each request; whoever works for the request finds it by
`current_trace`, as the two know nothing of each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from moe_serve.http.metrics.finished_sequence import FinishedSequence


@dataclass(slots=True)
class RequestTrace:
    """Filled while the request is served."""

    sequences: list[FinishedSequence] = field(default_factory=list)


_CURRENT: ContextVar[RequestTrace | None] = ContextVar("moe_serve_request_trace", default=None)


def current_trace() -> RequestTrace | None:
    """None: nobody asked for one."""
    return _CURRENT.get()


@contextlib.contextmanager
def open_trace() -> Iterator[RequestTrace]:
    trace = RequestTrace()
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)
