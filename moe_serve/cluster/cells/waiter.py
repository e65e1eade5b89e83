"""A thread that waits for the ranks of one cell, so that the engine's thread need not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_CLOSE_S = 30.0  # time for a wait to end after the coordinator was told to stop


class Waiter:
    """Runs one wait at a time. Used by the engine's thread; `on_end` is called on the waiter's."""

    def __init__(self, name: str, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._waits: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self.is_busy = False  # from `start` to `take`
        self.has_ended = False  # the wait is over, and `take` returns at once
        self._thread = threading.Thread(target=self._run, name=f"{name}-waiter", daemon=True)
        self._thread.start()

    def start(self, wait: Callable[[], None]) -> None:
        """Begins a wait."""
        assert not self.is_busy, "one wait at a time"
        self.is_busy, self.has_ended = True, False
        self._waits.put(wait)

    def take(self) -> None:
        """Acknowledges a wait that has ended. Raises the error that the wait raised."""
        assert self.has_ended, "the wait goes on"
        self.is_busy = self.has_ended = False
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the thread after its current wait, which must be about to end."""
        self._waits.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (wait := self._waits.get()) is not None:
            try:
                wait()
            except BaseException as error:  # top of the thread: `take` raises it
                self._error = error
            self.has_ended = True
            self._on_end()
