"""A clock for lateness and age that leaves out pauses of the process.

After a pause of 7 s every waiting request would be late, and all would be relegated or ended at
once. So one turn of the engine adds at most four usual turns to this clock, at least 1 s:

    engine's clock   0    1    2    3               10   11
    turns            |    |    |    |                |    |
    steady clock     0    1    2    3                7    8      usual turn 1 s: 7 s count as 4 s
"""

from __future__ import annotations

from moe_serve.clock import Clock

_USUAL_TURNS = 4.0
_LEAST_S = 1.0  # that a turn may always add
_WEIGHT = 0.1  # of a new turn in the usual duration
_MOST_LONGER = 2.0  # a turn counts as at most this times the usual one


class SteadyClock:
    """A clock without pauses. Call `turn` when a step ends, and `rest` when the engine has no work.
    Idle time counts, because it delays no request.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lost_s = 0.0  # engine's clock - steady clock
        self._turn_at: float | None = None  # on the engine's clock; None: idle
        self._usual_s = 0.0

    def __call__(self) -> float:
        now = self._clock()
        if self._turn_at is not None:
            now = min(now, self._turn_at + self._most_s)
        return now - self._lost_s

    @property
    def _most_s(self) -> float:
        return max(_LEAST_S, _USUAL_TURNS * self._usual_s)

    @property
    def is_resting(self) -> bool:
        return self._turn_at is None

    def turn(self) -> None:
        """Notes that a turn of the engine begins, or that it follows another one."""
        now = self._clock()
        if self._turn_at is not None:
            passed_s = now - self._turn_at
            self._lost_s += max(0.0, passed_s - self._most_s)
            longest_s = _MOST_LONGER * self._usual_s if self._usual_s else passed_s
            self._usual_s += _WEIGHT * (min(passed_s, longest_s) - self._usual_s)
        self._turn_at = now

    def rest(self) -> None:
        """Notes that the engine has no work."""
        self._turn_at = None

    def at(self, moment: float) -> float:
        """Converts a moment on the engine's clock, such as an arrival. One within the current turn
        is at most the turn's length ago."""
        if self._turn_at is not None and moment >= self._turn_at:
            return min(moment, self._turn_at + self._most_s) - self._lost_s
        return moment - self._lost_s
