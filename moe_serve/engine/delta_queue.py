"""What the engine has made for one reader, until it reads it."""

from __future__ import annotations

import asyncio

from moe_serve.engine.request import TokenDelta


class DeltaQueue:
    """Of one or several requests. On the event loop's thread only, and for one reader.

    A reader that falls behind the engine gets several steps at once.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deltas: list[TokenDelta] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta) -> None:
        self._deltas.append(delta)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[TokenDelta]:
        """All that lies ready; waits for the first."""
        while not self._deltas:
            self._reader = self._loop.create_future()
            await self._reader
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def is_empty(self) -> bool:
        return not self._deltas
