"""Estimates the time of a decode step from its number of rows, as measured in the running steps."""

from __future__ import annotations

from moe_serve.pipeline.costs.online_costs import RowAverages

_GROWING = 0.3  # share of a step's time that grows with its rows, where nothing was measured
_MAX_AGE = 2000  # measurements after which one that was not repeated is dropped


class StepTimes:
    """Averages of measured steps by number of rows.

    Beyond the rows measured lately, 70% of the nearest time is taken as fixed. That is optimistic
    for one sequence, where each new row activates new experts, so that drafts are tried; their
    first measurement replaces the estimate. Old measurements are dropped, as contexts grow and
    neighbours change.
    """

    def __init__(self) -> None:
        self._averages = RowAverages(growing=_GROWING, max_age=_MAX_AGE)
        self._known: dict[int, float] = {}  # estimates, until a measurement moves by 5%
        self._version = -1

    def observe(self, num_rows: int, seconds: float) -> None:
        self._averages.observe(num_rows, seconds)

    def seconds(self, num_rows: int) -> float:
        """Return the expected seconds; without any measurement, relative ones."""
        averages = self._averages
        if self._version != averages.version:
            self._version, self._known = averages.version, {}
        found = self._known.get(num_rows)
        if found is None:
            if averages.is_empty:
                found = 1.0 - _GROWING + _GROWING * num_rows
            else:
                found = averages.seconds(num_rows)
            self._known[num_rows] = found
        return found
