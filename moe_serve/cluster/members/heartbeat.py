"""Finds ranks that have been silent for too long. Bookkeeping only: it uses no sockets or
threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

DEFAULT_MISSES = 3

R = TypeVar("R")  # the type of a rank's name


@dataclass(frozen=True, slots=True)
class Silence(Generic[R]):
    """`rank` has sent no heartbeat for `seconds`."""

    rank: R
    seconds: float


class Heartbeats(Generic[R]):
    """Keeps the last heartbeat of each rank. A rank is late after `misses` periods without one.

        period 1 s, misses 3, last beat at t = 10: late from t = 13

    Any message from a rank may count as a heartbeat. A rank is watched from its first one until
    `forget`, so call `beat` for it once when it is admitted.
    """

    def __init__(
        self,
        period_s: float,
        misses: int = DEFAULT_MISSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert period_s > 0 and misses > 0, f"{period_s} s, {misses} misses"
        self._limit_s = period_s * misses
        self._clock = clock
        self._last_s: dict[R, float] = {}

    def beat(self, rank: R) -> None:
        self._last_s[rank] = self._clock()

    def forget(self, rank: R) -> None:
        """Stops watching a rank, which has left or is fenced off."""
        self._last_s.pop(rank, None)

    def excuse(self) -> None:
        """Forgives all silences so far, because this process did not read the messages."""
        now_s = self._clock()
        self._last_s = dict.fromkeys(self._last_s, now_s)

    def late(self) -> list[Silence[R]]:
        """Returns the ranks that are late, the longest silence first."""
        now_s = self._clock()
        silences = [Silence(rank, now_s - last_s) for rank, last_s in self._last_s.items()]
        late = [item for item in silences if item.seconds >= self._limit_s]
        return sorted(late, key=lambda item: -item.seconds)

    def next_check_s(self) -> float:
        """Returns the seconds in which no rank can become late: a time-out for message waits."""
        if not self._last_s:
            return self._limit_s
        return max(0.0, min(self._last_s.values()) + self._limit_s - self._clock())
