"""What the engine has made for one reader, until it reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moe_serve.engine.request.request import TokenDelta


class DeltaQueue:
    """Of one or several requests. On the event loop's thread only, and for one reader.

    A reader that falls behind the engine gets several steps at once. One that waits may be spared
    the wait: what it does with a step is then done in the turn of the loop that brought it, which
    takes half as long as to wake a task.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deltas: list[TokenDelta] = []
        self._reader: asyncio.Future[None] | None = None
        self._on_step: Callable[[], bool] | None = None

    def listen(self, on_step: Callable[[], bool]) -> None:
        """Have `on_step` called, in place of waking the reader that waits, when a step is there
        that is plain: it has neither ends nor log probabilities. It returns whether it has taken
        the step and the reader may go on waiting; what it raises is raised for the reader."""
        self._on_step = on_step

    def put(self, delta: TokenDelta) -> None:
        self.add(delta)
        self.tell()

    def add(self, delta: TokenDelta) -> bool:
        """`put` without telling; whether there was nothing before, so that `tell` must follow."""
        self._deltas.append(delta)
        return len(self._deltas) == 1

    def tell(self) -> None:
        """There is something to take."""
        reader = self._reader
        if reader is None or reader.done():  # it will look by itself
            return
        try:
            if self._on_step is not None and self._is_plain() and self._on_step():
                return
        except Exception as error:
            reader.set_exception(error)
        else:
            reader.set_result(None)

    async def wait(self) -> None:
        """Until there may be something to take."""
        if not self._deltas:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def take(self) -> list[TokenDelta]:
        """All that lies ready."""
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
