"""What a move costs the steps beside it: the 99th percentile of their times, before and during."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

_MOST_BEFORE, _MOST_DURING = 512, 8192  # steps that are remembered
_LEAST = 20  # steps without which a percentile says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveStall:
    """Seconds of the slowest step in a hundred; None: there were too few."""

    before_p99_s: float | None = None
    during_p99_s: float | None = None


class StepTimes:
    """Written by the engine thread; `stall` is read by any."""

    def __init__(self) -> None:
        self._calm: deque[float] = deque(maxlen=_MOST_BEFORE)
        self._moving: deque[float] = deque(maxlen=_MOST_DURING)
        self._is_moving = False
        self.stall = MoveStall()  # of the last move

    def add(self, seconds: float) -> None:
        """A step has ended well."""
        (self._moving if self._is_moving else self._calm).append(seconds)

    def begin(self) -> None:
        """A move begins."""
        self._moving.clear()
        self._is_moving = True

    def end(self) -> None:
        self._is_moving = False
        self.stall = MoveStall(before_p99_s=_p99(self._calm), during_p99_s=_p99(self._moving))


def _p99(seconds: deque[float]) -> float | None:
    return float(np.percentile(list(seconds), 99)) if len(seconds) >= _LEAST else None
