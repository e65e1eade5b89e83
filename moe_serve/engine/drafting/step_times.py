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

    def observe(self, num_rows: int, seconds: float) -> None:
        self._averages.observe(num_rows, seconds)

    def seconds(self, num_rows: int) -> float:
        """Return the expected seconds; without any measurement, relative ones."""
        if self._averages.is_empty:
            return 1.0 - _GROWING + _GROWING * num_rows
        return self._averages.seconds(num_rows)
