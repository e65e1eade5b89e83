"""Which ranks have been silent for too long. Bookkeeping only: knows no sockets and no threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

DEFAULT_MISSES = 3

R = TypeVar("R")  # what names a rank


@dataclass(frozen=True, slots=True)
class Silence(Generic[R]):
    """`rank` has sent no beat for `seconds`."""

    rank: R
    seconds: float


class Heartbeats(Generic[R]):
    """A rank is late when `misses` periods have passed since its last beat.

        period 1 s, misses 3, last beat at t = 10: late from t = 13

    Any message from a rank may count as a beat. A rank is watched from its first beat until
    `forget`: beat once in its name when it is admitted.
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
        """No longer expected: it has left, or is fenced."""
        self._last_s.pop(rank, None)

    def excuse(self) -> None:
        """Everybody's silence so far: it was us who did not listen."""
        now_s = self._clock()
        self._last_s = dict.fromkeys(self._last_s, now_s)

    def late(self) -> list[Silence[R]]:
        """The longest silence first."""
        now_s = self._clock()
        silences = [Silence(rank, now_s - last_s) for rank, last_s in self._last_s.items()]
        late = [item for item in silences if item.seconds >= self._limit_s]
        return sorted(late, key=lambda item: -item.seconds)

    def next_check_s(self) -> float:
        """How long nobody can become late: for the time-out of whoever waits for messages."""
        if not self._last_s:
            return self._limit_s
        return max(0.0, min(self._last_s.values()) + self._limit_s - self._clock())
