"""How many requests begin in one turn of the event loop.

A request's beginning (its JSON, its checks, its tokens) is a millisecond of work in one piece. When
hundreds arrive together, all would begin in the same turn, and every stream would stand still for
as long. So some begin, the loop comes round, then the next ones begin, in the order they came.
"""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 2


class Pace:
    """On the event loop's thread only; a new loop (the old one ended) begins anew."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_begun = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Returns when the caller may begin."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # what the other one had still to call, it never will
            self._loop, self._num_begun, self._waiting = loop, 0, deque()
        if self._num_begun == 0:
            loop.call_soon(self._next_turn)
        if self._num_begun < PER_TURN and not self._waiting:
            self._num_begun += 1
            return
        self._num_begun = max(self._num_begun, 1)
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next_turn(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < PER_TURN:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its client is still there
                waiter.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            asyncio.get_running_loop().call_soon(self._next_turn)
