"""What drives an engine, a server's thread or an offline loop, needs of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from moe_serve.engine.request.client import EngineStats
from moe_serve.engine.request.request import GenerationRequest, TokenDelta


class DrivenEngine(Protocol):
    """One engine, or several that step together. Not thread-safe but for the counts."""

    @property
    def has_work(self) -> bool: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_seats(self) -> int:
        """Sequences that may run at once."""
        ...

    def add(self, request: GenerationRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[TokenDelta]: ...

    def stats(self) -> EngineStats: ...

    def check_integrity(self) -> None: ...

    def set_waker(self, wake: Callable[[], None]) -> None:
        """`wake` may be called on any thread: there is work although no request came."""
        ...

    def stop_waiting(self) -> None:
        """`close` is near: a step that waits for others gives up. On any thread."""
        ...

    def close(self) -> None:
        """End what runs outside this process. The engine is not used any more."""
        ...
