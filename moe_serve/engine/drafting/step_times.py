"""Estimates the time of a decode step from its number of rows, as measured in the running steps."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

_GROWING, _POWER = 0.3, 0.75  # of the time of a step with r rows: 0.7 + 0.3 r^0.75, relative
_NEAR = 0.06  # numbers of rows that differ by at most 6% share an average
_WEIGHT = 0.2  # of a new measurement
_DRIFT = 0.03  # a change of an average that changes the estimates
_MAX_AGE = 128  # measurements after which an average that was not measured again is dropped
_SPARED = 3  # steps without drafts that are not measured after one that was
_MOST_SLOWER = 2.0  # the first measurement counts as at most this times the estimate
_NUM_FIRST = 3  # measurements of which the fastest counts, as code that is new is slow
_MOST_SLOWER_LATER = 1.25  # a later one counts as at most this times the average


@dataclass(slots=True)
class _Average:
    """The measured time of steps with about `num_rows` rows, over that of a typical CPU."""

    num_rows: int
    ratio: float
    published: float  # the ratio that estimates use
    measured_at: int  # number of the last measurement
    num_measured: int = 1


class StepTimes:
    """Averages of measured steps by number of rows.

    What is averaged is the time over that of a typical CPU, whose steps take 0.7 + 0.3 r^0.75 with
    r rows, in any unit. So steps that have nearly as many rows share an average, and a further row
    costs something all the same. Between averages it is interpolated, and below them the nearest
    holds. Rows above them are taken to add what they add on a typical CPU: a first drafted token
    makes a step longer by work that further ones do not repeat. That is optimistic for one
    sequence, where each new row activates new experts, so that drafts are tried; their measurements
    replace the estimate. Old measurements are dropped, as contexts grow and neighbours change.
    """

    def __init__(self) -> None:
        self._averages: list[_Average] = []  # in the order of their rows
        self._known: dict[int, float] = _Known(self._averages)  # until an average moves
        self._num_spared = self._num_measured = 0

    def observe(self, num_rows: int, seconds: float, *, has_drafts: bool) -> int:
        """Adds the time of a step. Most steps without drafts are left out, as they are many.
        Returns the number of steps that the measurement stands for; 0: it was left out."""
        num_steps = 1
        if not has_drafts:
            self._num_spared = (self._num_spared + 1) % (1 + _SPARED)
            if self._num_spared:
                return 0
            num_steps += _SPARED
        self._num_measured += 1
        if self._num_measured % _MAX_AGE == 0:
            oldest = self._num_measured - _MAX_AGE
            self._averages = [each for each in self._averages if each.measured_at >= oldest]
            self._known = _Known(self._averages)
        self._add(num_rows, max(seconds, 1e-9) / _relative(num_rows))
        return num_steps

    @property
    def seconds(self) -> Callable[[int], float]:
        """Returns a function from a number of rows to the expected seconds, or to relative times
        before any measurement. Use it before the next measurement.
        """
        return self._known.__getitem__

    def _add(self, num_rows: int, ratio: float) -> None:
        average = self._nearest(num_rows)
        if average is None:
            if self._averages:  # a pause of the machine must not end long drafts
                estimate = self._known[num_rows] / _relative(num_rows)
                ratio = min(ratio, _MOST_SLOWER * estimate)
            average = _Average(num_rows, ratio, ratio, self._num_measured)
            bisect.insort(self._averages, average, key=_rows)
            self._known = _Known(self._averages)
            return
        if average.num_measured < _NUM_FIRST:
            average.ratio = min(ratio, average.ratio)
        else:
            ratio = min(ratio, average.ratio * _MOST_SLOWER_LATER)
            average.ratio += _WEIGHT * (ratio - average.ratio)
        average.num_measured += 1
        average.measured_at = self._num_measured
        if abs(average.ratio / average.published - 1) > _DRIFT:
            average.published = average.ratio
            self._known = _Known(self._averages)

    def _nearest(self, num_rows: int) -> _Average | None:
        right = bisect.bisect_left(self._averages, num_rows, key=_rows)
        near = self._averages[max(0, right - 1) : right + 1]
        found = min(near, key=lambda each: abs(math.log(each.num_rows / num_rows)), default=None)
        if found is None or abs(math.log(found.num_rows / num_rows)) >= _NEAR:
            return None
        return found


class _Known(dict[int, float]):
    """Estimates by number of rows, made when they are asked for."""

    def __init__(self, averages: list[_Average]) -> None:
        super().__init__()
        self._averages = averages

    def __missing__(self, num_rows: int) -> float:
        found = self[num_rows] = self._estimate(num_rows)
        return found

    def _estimate(self, num_rows: int) -> float:
        right, relative = (
            bisect.bisect_left(self._averages, num_rows, key=_rows),
            _relative(num_rows),
        )
        near = self._averages[max(0, right - 1) : right + 1]
        if not near:
            return relative
        low, high = near[0], near[-1]
        if low is not high:
            share = (num_rows - low.num_rows) / (high.num_rows - low.num_rows)
            return relative * (low.published * (1 - share) + high.published * share)
        if low.num_rows >= num_rows:
            return relative * low.published
        more = relative - _relative(low.num_rows)
        row = min([average.published for average in self._averages])
        return low.published * (relative - more) + row * more


def _rows(average: _Average) -> int:
    return average.num_rows


def _relative(num_rows: int) -> float:
    return 1.0 - _GROWING + _GROWING * float(num_rows**_POWER)
