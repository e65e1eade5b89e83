"""Forecasts a rate some time ahead from its level, its trend, and the errors of earlier forecasts.

Level and trend are smoothed exponentially over time (Holt). A forecast is compared with the level
at the time that it was made for; the spread of these errors is that of the next forecast. The
errors do not contain bursts within minutes: for those, cells are not filled completely.
"""

from __future__ import annotations

import math
from collections import deque

_LEVEL_S, _TREND_S = 1200.0, 2400.0  # the times over which the two are smoothed
_SPREAD_SHARE = 0.1  # of a new error in the mean of their squares


class RateForecast:
    """A forecast of a rate that is observed interval by interval."""

    def __init__(self) -> None:
        self._level: float | None = None
        self._trend = 0.0  # of the level, per second
        self._at_s = 0.0  # the middle of the last interval
        self._variance = 0.0
        self._made: deque[tuple[float, float]] = deque()  # (moment, forecast for it)

    def observe(self, rate: float, at_s: float, interval_s: float) -> None:
        """Adds the mean rate of the interval that ended at `at_s`."""
        middle = at_s - interval_s / 2
        if self._level is None:
            self._level, self._at_s, self._variance = rate, middle, rate / _LEVEL_S
            return
        gap = middle - self._at_s
        expected = self._level + self._trend * gap
        weight = 1 - math.exp(-gap / _LEVEL_S)
        level = expected + weight * (rate - expected)
        slope = (level - self._level) / gap
        self._trend += (1 - math.exp(-gap / _TREND_S)) * (slope - self._trend)
        self._level, self._at_s = level, middle
        while self._made and self._made[0][0] <= middle:
            _, forecast = self._made.popleft()
            self._variance += _SPREAD_SHARE * ((level - forecast) ** 2 - self._variance)

    @property
    def level(self) -> float:
        """The rate now."""
        return self._level or 0.0

    def predict(self, at_s: float) -> tuple[float, float]:
        """Returns the rate expected at a moment, and the standard deviation of its error."""
        if self._level is None:
            return 0.0, 0.0
        rate = max(0.0, self._level + self._trend * (at_s - self._at_s))
        self._made.append((at_s, rate))
        return rate, math.sqrt(self._variance)
