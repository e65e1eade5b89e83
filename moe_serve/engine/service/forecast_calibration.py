"""Compares forecasts with what happened, and corrects them.

Two quantiles of actual / predicted over the recent requests are kept: the median, which makes the
forecast right on average, and the ninth decile, which makes it cautious (split conformal). They
cover what they promise whatever the raw forecast's error is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moe_serve.engine.request.service_stats import ForecastError

_NUM_RECENT = 256
_NUM_NEEDED = 20  # before that the factors are guesses
_QUANTILE = 0.9
_LEAST_S = 0.001
_EVERY = 8  # comparisons between two computations of the quantiles


@dataclass(frozen=True, slots=True)
class Factors:
    """Holds the factors of a raw forecast, for its median and for its ninth decile."""

    median: float = 1.0
    p90: float = 1.5


class ForecastCalibration:
    """Calibrates one tier's forecasts, on the engine's thread. `factors`, `ratios` and
    `errors` are safe from any thread."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_NUM_RECENT)
        self._errors: deque[float] = deque(maxlen=_NUM_RECENT)
        self.num_compared = 0
        self.factors = Factors()

    def compare(self, raw_s: float, actual_s: float) -> None:
        """Adds a request that got its first token. `raw_s`: the forecast without factors."""
        ratio = max(actual_s, _LEAST_S) / max(raw_s, _LEAST_S)
        self._errors.append(abs(1 - self.factors.median / ratio))
        self._ratios.append(ratio)
        self.num_compared += 1
        count = len(self._ratios)
        if count < _NUM_NEEDED or self.num_compared % _EVERY:
            return
        share = min(1.0, _QUANTILE * (count + 1) / count)
        median, p90 = np.quantile(np.array(self._ratios), (0.5, share)).tolist()
        self.factors = Factors(median, p90)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Actual over raw forecast, of the recent requests."""
        return tuple(self._ratios)

    @property
    def errors(self) -> tuple[float, ...]:
        """|forecast - actual| / actual of the recent requests."""
        return tuple(self._errors)


def error_of(calibrations: Iterable[ForecastCalibration]) -> ForecastError:
    """Returns the error over several tiers. `p90_ratio` is the largest of their cautious
    factors."""
    calibrations = list(calibrations)
    most = max([each.factors.p90 for each in calibrations], default=1.0)
    ratios = np.array([ratio for each in calibrations for ratio in each.ratios])
    if not len(ratios):
        return ForecastError(p90_ratio=most)
    errors = np.array([error for each in calibrations for error in each.errors])
    return ForecastError(
        num_compared=sum([each.num_compared for each in calibrations]),
        median_ratio=float(np.median(ratios)),
        p90_ratio=most,
        median_error=float(np.median(errors)),
    )
