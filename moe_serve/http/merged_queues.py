"""Reading the queues of several sequences as one, everything that has arrived at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moe_serve.engine.request import TokenDelta


class MergedQueues:
    """`next` waits for one delta and takes along whatever else lies ready.

    A reader that falls behind the engine gets several steps at once, and writes them as one chunk.
    Several queues are pumped into one by a task each; a single queue is read directly.
    """

    def __init__(self, queues: Sequence[asyncio.Queue[TokenDelta]]) -> None:
        self._queue: asyncio.Queue[TokenDelta]
        self._pumps: list[asyncio.Task[None]] = []
        if len(queues) == 1:
            self._queue = queues[0]
        else:
            self._queue = asyncio.Queue()
            self._pumps = [asyncio.create_task(self._pump(queue)) for queue in queues]

    async def next(self) -> list[TokenDelta]:
        deltas = [await self._queue.get()]
        while not self._queue.empty():
            deltas.append(self._queue.get_nowait())
        return deltas

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()

    async def _pump(self, queue: asyncio.Queue[TokenDelta]) -> None:
        is_finished = False
        while not is_finished:
            delta = await queue.get()
            self._queue.put_nowait(delta)
            is_finished = delta.finish_reason is not None
