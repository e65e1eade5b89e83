"""Forecasts a rate some time ahead from its level, its trend, and the errors of earlier forecasts.

Level and trend are smoothed exponentially over time (Holt). A forecast is compared with the level
at the time that it was made for; the spread of these errors is that of the next forecast. The
errors do not contain bursts within minutes: for those, cells are not filled completely.

Such a forecast is slow: it shows a sudden load only after the time constant of the level.
`SeenRates` gives the rate that was seen, less what may be chance:

    bound(n requests in T seconds) = (n - 2 sqrt(n)) / T       25 in 60 s: 0.25 of 0.42 per second

as the standard deviation of the number of independent requests is sqrt(n).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_LEVEL_S, _TREND_S = 1200.0, 2400.0  # the times over which the two are smoothed
_SPREAD_SHARE = 0.1  # of a new error in the mean of their squares
_MEMORY_S = 3600.0  # of the bursts that may come again
_RARE_SHARE = 0.05  # of the requests of that time: the fullest windows with so few are left out
_DEVIATIONS = 2.0


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


class SeenRates:
    """Remembers the rates of the last hour, in windows of one interval and of the time that a new
    cell takes to serve. Bursts that are shorter than that time cannot be followed, so what the
    bursts of the last hour needed is kept."""

    def __init__(self) -> None:
        self._seen: deque[_Window] = deque()  # intervals, the oldest first
        self._recent: deque[_Window] = deque()  # those of the last window of the longer kind

    def observe(self, num: int, at_s: float, interval_s: float, horizon_s: float) -> None:
        """Adds the number of requests of the interval that ended at `at_s`."""
        self._recent.append(_Window(at_s, num, num / interval_s, interval_s))
        while len(self._recent) > 1 and self._recent[0].at_s <= at_s - horizon_s:
            self._recent.popleft()
        several_s = sum(one.span_s for one in self._recent)
        several = _least_rate(sum(one.num for one in self._recent), several_s)
        rate = max(_least_rate(num, interval_s), several)
        self._seen.append(_Window(at_s, num, rate, interval_s))
        while self._seen[0].at_s <= at_s - _MEMORY_S:
            self._seen.popleft()

    @property
    def now(self) -> float:
        """The rate of the last window that is more than chance; 0 before the first."""
        return self._seen[-1].rate if self._seen else 0.0

    @property
    def bursts(self) -> float:
        """The largest such rate of the last hour, without the windows of rare requests."""
        left = _RARE_SHARE * sum(one.num for one in self._seen)
        for one in sorted(self._seen, key=lambda window: -window.rate):
            left -= one.num
            if left < 0:
                return one.rate
        return 0.0


@dataclass(frozen=True, slots=True)
class _Window:
    """An interval that ended at `at_s`. `rate`: the larger bound of the two windows that
    end there."""

    at_s: float
    num: int
    rate: float
    span_s: float


def _least_rate(num: int, seconds: float) -> float:
    """Returns the rate that is more than chance, per second."""
    return max(0.0, num - _DEVIATIONS * math.sqrt(num)) / seconds
