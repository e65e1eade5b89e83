"""Limits how many requests start in one turn of the event loop.

Starting a request (JSON, checks, tokens) is a millisecond of uninterrupted work. If hundreds arrive
together, all would start in the same turn, and every stream would stall meanwhile. So a few start,
the loop runs once, then the next few start, in the order of arrival.
"""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 2


class Pace:
    """Used on the event loop's thread only. With a new loop, after the old one has ended, it starts
    over."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_begun = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Waits until the caller may start."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the old loop will never run its pending calls
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
            if not waiter.done():  # its client is still connected
                waiter.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            asyncio.get_running_loop().call_soon(self._next_turn)
