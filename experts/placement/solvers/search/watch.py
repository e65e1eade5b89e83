"""Ends a search early: at a deadline, or when the caller asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from experts.placement.solution import Progress

_BETWEEN_S = 0.1


class Watch:
    """A clock that starts on construction."""

    def __init__(
        self,
        bound: float,
        seconds: float | None,
        report: Callable[[Progress], bool] | None,
    ) -> None:
        self._start = time.perf_counter()
        self._bound, self._seconds, self._report = bound, seconds, report
        self._reported, self._is_over = 0.0, False

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def is_over(self) -> bool:
        """True if the search was ended before its work was done."""
        return self._is_over

    def end(self) -> None:
        """Ends the search, as after Ctrl-C."""
        self._is_over = True

    def stop(self) -> bool:
        """Returns True if the deadline is over or a report returned False."""
        if self._seconds is not None and self.elapsed >= self._seconds:
            self._is_over = True
        return self._is_over

    def tell(self, objective: float, done: float) -> bool:
        """Reports if the last report is long enough ago. Returns `stop`."""
        is_due = self.elapsed >= self._reported + _BETWEEN_S
        # do not report again after the end
        if self._report is not None and is_due and not self._is_over:
            self._reported = self.elapsed
            progress = Progress(
                objective=objective, bound=self._bound, done=done, seconds=self.elapsed
            )
            self._is_over |= not self._report(progress)
        return self.stop()
