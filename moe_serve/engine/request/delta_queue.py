"""Queues the engine's deltas for one reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moe_serve.engine.request.request import TokenDelta


class DeltaQueue:
    """Holds the deltas of one or several requests for one reader. Use it on the event loop's thread
    only.

    A reader that is slower than the engine gets several steps at once. A waiting reader can
    register `on_step` to handle a step within the event loop's turn that brought it, which takes
    half as long as waking a task.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deltas: list[TokenDelta] = []
        self._reader: asyncio.Future[None] | None = None
        self._on_step: Callable[[], bool] | None = None

    def listen(self, on_step: Callable[[], bool]) -> None:
        """Calls `on_step` instead of waking the waiting reader when a plain step arrives.

        A plain step has no finish reason and no log probabilities. `on_step` returns True if it
        took the step and the reader may stay asleep. An exception that it raises is raised in the
        reader.
        """
        self._on_step = on_step

    def put(self, delta: TokenDelta) -> None:
        self.add(delta)
        self.tell()

    def add(self, delta: TokenDelta) -> bool:
        """Adds a delta without waking the reader. Returns True if the queue was empty, so that
        `tell` must follow."""
        self._deltas.append(delta)
        return len(self._deltas) == 1

    def tell(self) -> None:
        """Wakes the reader, because there are deltas to take."""
        reader = self._reader
        if reader is None or reader.done():  # the reader will check by itself
            return
        try:
            if self._on_step is not None and self._is_plain() and self._on_step():
                return
        except Exception as error:
            reader.set_exception(error)
        else:
            reader.set_result(None)

    async def wait(self) -> None:
        """Waits until there may be deltas to take."""
        if not self._deltas:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def take(self) -> list[TokenDelta]:
        """Returns all deltas and empties the queue."""
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def is_empty(self) -> bool:
        return not self._deltas

    def _is_plain(self) -> bool:
        for delta in self._deltas:
            if delta.finish_reason is not None:
                return False
            if delta.logprobs is not None or delta.prompt_logprobs is not None:
                return False
        return True
