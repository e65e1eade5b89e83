"""Compares forecasts with what happened, and keeps the factor that makes them cautious.

The factor is a quantile of actual / predicted over the recent requests (split conformal), so it
covers nine of ten whatever the forecast's error is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from moe_serve.engine.request.service_stats import ForecastError

_NUM_RECENT = 256
_NUM_NEEDED = 20  # before that the factor is a guess
_FIRST_RATIO = 1.5
_QUANTILE = 0.9
_LEAST_S = 0.001
_EVERY = 8  # comparisons between two computations of the quantile


class Calibration:
    """Of one tier, used on the engine's thread. `p90_ratio` is safe from any thread."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_compared = 0
        self.p90_ratio = _FIRST_RATIO

    def compare(self, predicted_s: float, actual_s: float) -> None:
        """Add a request that got its first token."""
        self._ratios.append(max(actual_s, _LEAST_S) / max(predicted_s, _LEAST_S))
        self._num_compared += 1
        count = len(self._ratios)
        if count < _NUM_NEEDED or self._num_compared % _EVERY:
            return
        share = min(1.0, _QUANTILE * (count + 1) / count)
        self.p90_ratio = max(1.0, float(np.quantile(np.array(self._ratios), share)))

    @property
    def ratios(self) -> tuple[float, ...]:
        """The recent ratios. Safe from any thread."""
        return tuple(self._ratios)

    @property
    def num_compared(self) -> int:
        return self._num_compared


def error_of(calibrations: Iterable[Calibration]) -> ForecastError:
    """Return the error over several tiers. `p90_ratio` is the largest of their factors."""
    calibrations = list(calibrations)
    ratios = np.array([ratio for each in calibrations for ratio in each.ratios])
    most = max([each.p90_ratio for each in calibrations], default=1.0)
    if not len(ratios):
        return ForecastError(p90_ratio=most)
    return ForecastError(
        num_compared=sum([each.num_compared for each in calibrations]),
        median_ratio=float(np.median(ratios)),
        p90_ratio=most,
        median_error=float(np.median(np.abs(1 - 1 / ratios))),
    )
