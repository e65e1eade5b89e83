"""Collects data about the current HTTP request for tracing.

A server that records spans opens one trace for each request. Code that serves the request finds it
by `current_trace`, so that the two parts do not depend on each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from moe_serve.http.metrics.finished_sequence import FinishedSequence


@dataclass(slots=True)
class RequestTrace:
    """Data about one request, filled while it is served."""

    sequences: list[FinishedSequence] = field(default_factory=list)


_CURRENT: ContextVar[RequestTrace | None] = ContextVar("moe_serve_request_trace", default=None)


def current_trace() -> RequestTrace | None:
    """The trace of the current request, or None if none is open."""
    return _CURRENT.get()


@contextlib.contextmanager
def open_trace() -> Iterator[RequestTrace]:
    trace = RequestTrace()
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)
