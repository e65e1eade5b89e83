"""The engine interface used by its driver: a server's thread or an offline loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.engine.request.stats import EngineStats
from moe_serve.engine.service.admission import Admission


class DrivenEngine(Protocol):
    """One engine, several that step together, or several cells. Only the counts may be read from
    other threads."""

    @property
    def has_work(self) -> bool: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_seats(self) -> int:
        """Number of sequences that may run at once."""
        ...

    @property
    def admission(self) -> Admission | None:
        """Decides on new requests, on the event loop's thread; None without service tiers."""
        ...

    def add(self, request: GenerationRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[TokenDelta]: ...

    def stats(self) -> EngineStats: ...

    def check_integrity(self) -> None: ...

    def set_waker(self, wake: Callable[[], None]) -> None:
        """Sets a callback that any thread may call to signal work other than a new request."""
        ...

    def stop_waiting(self) -> None:
        """Announces `close`: a step that waits for ranks gives up. Safe from any thread."""
        ...

    def close(self) -> None:
        """Ends the engine's other processes. The engine must not be used afterwards."""
        ...
