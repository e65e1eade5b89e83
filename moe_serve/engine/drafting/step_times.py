"""Estimates the time of a decode step from its number of rows, as measured in the running steps."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.engine.drafting.cold_steps import ColdSteps

_GROWING, _POWER = 0.3, 0.75  # of the time of a step with r rows: 0.7 + 0.3 r^0.75, relative
_NEAR = 0.06  # numbers of rows that differ by at most 6% share an average
_WEIGHT, _DRAFTED_WEIGHT = 0.1, 0.1  # least weight of a new plain step, and of one with drafts
_DRIFT = 0.03  # a change of an average that changes the estimates
_MOST_DRAFTED = 12  # steps with drafts in turn, before a plain one
_LEAST_DRAFTED = 4  # drafted tokens that any step may verify
_MAX_AGE = 512  # steps after which an average that was not measured again counts less
_MOST_OFF = 3.0  # a measurement counts as a third of the average at least, and three times at most


class StepTimes:
    """Averages of measured steps by number of rows.

    The time of a plain step is averaged over that of a typical CPU, whose steps take
    0.7 + 0.3 r^0.75 with r rows, in any unit. A step with drafts is compared with plain steps of as
    many sequences, which ran shortly before: what is averaged is its time over that of a plain step
    on which the CPU's further rows cost what they typically do. So a machine that becomes slower
    makes drafts look neither cheaper nor dearer. The comparisons are kept by the number of
    sequences, in powers of two.

    Plain steps shortly behind drafts are longer than others. They count as if they were not
    (`ColdSteps`), so that drafts are compared with what all steps would be without them.

    Before a measurement the estimate is that of the neighbours, and it counts like one measurement.
    So drafts are tried, and a single slow or fast step decides little. Old measurements fade, as
    contexts grow and neighbours change.
    """

    def __init__(self) -> None:
        self._plain, self._cold = _Averages(_WEIGHT, None), ColdSteps()
        self._drafted: dict[int, _Averages] = {}  # by the bits of the number of sequences
        self._known: dict[int, _Known] = {}  # by the number of sequences, until an average moves
        self._num_steps = self._num_kept = 0  # so far, and when averages faded last
        self._num_plain = 0  # of the steps, up to the last plain one

    def observe(
        self, num_rows: int, seconds: float, *, num_drafted: int = 0, num_steps: int = 1
    ) -> None:
        """Adds the time of a step, or the mean time of several plain steps. `num_drafted` of its
        rows were drafted."""
        base = num_rows - num_drafted
        self._num_steps += num_steps
        if self._num_steps >= self._num_kept + _MAX_AGE:
            for averages in (self._plain, *self._drafted.values()):
                averages.fade(self._num_kept, self._num_steps)
            self._num_kept = self._num_steps
            self._known.clear()
        ratio = max(seconds, 1e-9) / _relative(num_rows)
        if not num_drafted:
            num_new, self._num_plain = self._num_steps - self._num_plain, self._num_steps
            if not self._cold.is_warm:
                ratio /= self._cold.factor(num_rows)
                self._cold.note_plain(num_rows, seconds, num_steps)
            num_steps = max(num_steps, num_new // 2)  # it stands for steps with drafts before it
            has_moved = self._plain.add(num_rows, ratio, num_steps, self._num_steps)
        elif self._plain.is_empty:
            has_moved = False  # there is nothing to compare with
        else:
            self._cold.note_drafts()
            ratio /= self._plain.at(base)
            has_moved = self._drafted_of(base).add(num_rows, ratio, 1, self._num_steps)
        if has_moved:
            self._known.clear()

    def seconds(self, num_sequences: int) -> Callable[[int], float]:
        """Returns a function that predicts the seconds of a step of these sequences from its number
        of rows. Before any measurement the times are relative. It holds until the next measurement.
        """
        known = self._known.get(num_sequences)
        if known is None:
            plain, drafted = self._plain.at(num_sequences), self._drafted_of(num_sequences)
            known = self._known[num_sequences] = _Known(num_sequences, plain, drafted)
        return known.__getitem__

    def cold_s(self, num_sequences: int) -> float:
        """Returns by how much a plain step that comes next is longer because of drafts."""
        if self._cold.is_warm:
            return 0.0
        more = self._cold.factor(num_sequences) - 1.0
        return more * self.seconds(num_sequences)(num_sequences)

    def is_plain_due(self, *, is_close: bool) -> bool:
        """Returns whether a step should have no drafts, so that there is a new one to compare with.
        If it `is_close` whether drafts pay, some in turn are due from time to time, the last of
        which finds warm caches."""
        if is_close and self._cold.is_due:
            return True
        return (self._num_steps - self._num_plain) % (1 + _MOST_DRAFTED) == _MOST_DRAFTED

    def num_known(self, num_sequences: int) -> int:
        """Returns the number of drafted tokens that a step may verify: four, or more as long as it
        has at most twice as many rows as any measured one. Beyond that the estimate is a guess.
        """
        most_rows = max(num_sequences, self._drafted_of(num_sequences).most_rows)
        return max(_LEAST_DRAFTED, 2 * most_rows - num_sequences)

    def _drafted_of(self, num_sequences: int) -> _Averages:
        key = num_sequences.bit_length()
        found = self._drafted.get(key)
        if found is None:
            found = self._drafted[key] = _Averages(_DRAFTED_WEIGHT, 1.0)
        return found


class _Known(dict[int, float]):
    """Estimates by number of rows, made when they are asked for."""

    def __init__(self, num_sequences: int, plain: float, drafted: _Averages) -> None:
        super().__init__()
        self._plain, self._drafted, self._base = plain, drafted, _relative(num_sequences)
        self[num_sequences] = plain * self._base

    def __missing__(self, num_rows: int) -> float:
        typical = _relative(num_rows)
        least = (self._base + typical) / 2  # further rows never cost nothing
        found = self[num_rows] = self._plain * max(least, typical * self._drafted.at(num_rows))
        return found


@dataclass(slots=True)
class _Average:
    """The average of steps with about `num_rows` rows."""

    num_rows: int
    ratio: float
    published: float  # the ratio that estimates use
    measured_at: int = 0  # number of the last step
    num_steps: int = 0


class _Averages:
    """Averages of ratios to typical times, by number of rows."""

    def __init__(self, least_weight: float, prior: float | None) -> None:
        """`least_weight` is that of a new measurement, when there were many. `prior` is the
        estimate before the first one; None: that one itself."""
        self._averages: list[_Average] = []
        self._rows: list[int] = []  # of the averages, in their order
        self._least_weight, self._prior = least_weight, prior

    @property
    def is_empty(self) -> bool:
        return not self._averages

    @property
    def most_rows(self) -> int:
        """The largest number of rows that was measured."""
        return self._averages[-1].num_rows if self._averages else 0

    def at(self, num_rows: int) -> float:
        """Returns the estimate for a number of rows.

        Between averages it is interpolated, and below them the nearest holds. Rows above them are
        taken to add what they typically add: a first drafted token makes a step longer by work that
        further ones do not repeat.
        """
        right = bisect.bisect_left(self._rows, num_rows)
        near = self._averages[max(0, right - 1) : right + 1]
        if not near:
            return 1.0
        if near[-1].num_rows == num_rows:
            return near[-1].published
        low, high = near[0], near[-1]
        if low is not high:
            share = (num_rows - low.num_rows) / (high.num_rows - low.num_rows)
            return low.published * (1 - share) + high.published * share
        if low.num_rows >= num_rows:
            return low.published
        share = _relative(low.num_rows) / _relative(num_rows)
        row = low.published if self._prior is None else min(self._prior, low.published)
        return low.published * share + row * (1 - share)

    def fade(self, oldest: int, now: int) -> None:
        """Moves averages that were not measured again since a step halfway to the prior, so that
        what was dear is tried ever less often. Without a prior they are dropped."""
        for average in self._averages:
            if average.measured_at < oldest and self._prior is not None:
                average.ratio = average.published = math.sqrt(average.ratio * self._prior)
                average.num_steps, average.measured_at = 0, now
        self._averages = [each for each in self._averages if each.measured_at >= oldest]
        self._rows = [each.num_rows for each in self._averages]

    def add(self, num_rows: int, ratio: float, num_steps: int, number: int) -> bool:
        """Adds the mean of some steps, of which the last has a number. Returns True if estimates
        have changed."""
        average = self._nearest(num_rows)
        if average is None:
            is_known = self._averages or self._prior is not None
            average = _Average(num_rows, self.at(num_rows) if is_known else ratio, 0.0)
            place = bisect.bisect_left(self._rows, num_rows)
            self._averages.insert(place, average)
            self._rows.insert(place, num_rows)
        average.num_steps += num_steps
        average.measured_at = number
        ratio = min(max(ratio, average.ratio / _MOST_OFF), average.ratio * _MOST_OFF)
        least = 1 - (1 - self._least_weight) ** num_steps
        weight = max(least, num_steps / (1 + average.num_steps))
        average.ratio += weight * (ratio - average.ratio)
        if abs(average.ratio - average.published) <= _DRIFT * average.ratio:
            return False
        average.published = average.ratio
        return True

    def _nearest(self, num_rows: int) -> _Average | None:
        right = bisect.bisect_left(self._rows, num_rows)
        near = self._averages[max(0, right - 1) : right + 1]
        if near and near[-1].num_rows == num_rows:
            return near[-1]
        found = min(near, key=lambda each: abs(math.log(each.num_rows / num_rows)), default=None)
        if found is None or abs(math.log(found.num_rows / num_rows)) >= _NEAR:
            return None
        return found


def _relative(num_rows: int) -> float:
    return 1.0 - _GROWING + _GROWING * float(num_rows**_POWER)
