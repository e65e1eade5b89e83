"""Measures the delay of the event loop with a clock that should tick every 20 ms.

    due        0    20    40    60    80   100          the loop is blocked from 25 to 85
    ticks      0    20    85   (60)  (80)  100          lags 0, 0, 45, 25, 5, 0

A missed tick counts with its own lag, so that the share of slow ticks is the share of time: a block
of one second weighs as much as fifty ticks, not as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PERIOD_S = 0.02
_MAX_MISSED = 3000  # a minute; longer blocks are not counted to the end


class LoopLag:
    """Calls `observe` with the lag of every tick from `start` to `stop`, both on the loop's
    thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, observe: Callable[[float], None]) -> None:
        self._loop = loop
        self._observe = observe
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._due = self._loop.time() + PERIOD_S
        self._timer = self._loop.call_at(self._due, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        now = self._loop.time()
        for lag in lags(self._due, now):
            self._observe(lag)
        self._due += PERIOD_S * (1 + max(0, int((now - self._due) / PERIOD_S)))
        self._timer = self._loop.call_at(self._due, self._tick)


def lags(due: float, now: float) -> list[float]:
    """The lags of the first due tick and of those missed since, the longest first."""
    count = min(_MAX_MISSED, 1 + max(0, int((now - due) / PERIOD_S)))
    return [max(0.0, now - due - i * PERIOD_S) for i in range(count)]
