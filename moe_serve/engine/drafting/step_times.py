"""Estimates the time of a decode step from its number of rows, as measured in the running steps."""

from __future__ import annotations

from collections.abc import Callable

from moe_serve.pipeline.costs.online_costs import RowAverages

_GROWING = 0.3  # share of a step's time that grows with its rows, where nothing was measured
_MAX_AGE = 500  # measurements after which one that was not repeated is dropped
_SPARED = 3  # steps without drafts that are not measured after one that was
_MOST_SLOWER = 2.0  # the first measurement counts as at most this times the estimate


class StepTimes:
    """Averages of measured steps by number of rows.

    Beyond the rows measured lately, 70% of the nearest time is taken as fixed. That is optimistic
    for one sequence, where each new row activates new experts, so that drafts are tried; their
    first measurement replaces the estimate. Old measurements are dropped, as contexts grow and
    neighbours change.
    """

    def __init__(self) -> None:
        self._averages = RowAverages(growing=_GROWING, max_age=_MAX_AGE)
        self._known = _Known(self._averages)  # until a measurement moves by 5%
        self._version = self._averages.version
        self._num_spared = 0

    def observe(self, num_rows: int, seconds: float, *, has_drafts: bool) -> None:
        """Add the time of a step. Most steps without drafts are left out, as they are many."""
        if not has_drafts:
            self._num_spared = (self._num_spared + 1) % (1 + _SPARED)
            if self._num_spared:
                return
        if not self._averages.is_empty:  # a pause of the machine must not end long drafts
            seconds = min(seconds, _MOST_SLOWER * self.seconds(num_rows))
        self._averages.observe(num_rows, seconds)

    @property
    def seconds(self) -> Callable[[int], float]:
        """A function from a number of rows to the expected seconds; without any measurement, to
        relative ones. To be used before the next measurement."""
        if self._version != self._averages.version:
            self._version, self._known = self._averages.version, _Known(self._averages)
        return self._known.__getitem__


class _Known(dict[int, float]):
    """Estimates by number of rows, made when they are asked for."""

    def __init__(self, averages: RowAverages) -> None:
        super().__init__()
        self._averages = averages

    def __missing__(self, num_rows: int) -> float:
        if self._averages.is_empty:
            found = 1.0 - _GROWING + _GROWING * num_rows
        else:
            found = self._averages.seconds(num_rows)
        self[num_rows] = found
        return found
