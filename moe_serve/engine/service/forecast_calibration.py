"""Compares forecasts with what happened, and corrects them.

The recent ratios of actual / predicted are kept with the predictions. A forecast is corrected by
the ratios of those that predicted most nearly the same: short waits are predicted better than long
ones. The median makes it right on average, and the ninth decile cautious (split conformal).

The promises decide how cautious a refusal is: the quantile on which it rests becomes larger
with every broken promise, and a little smaller with every kept one, so that nearly all are kept
and no more requests are refused than that takes (adaptive conformal inference).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.service_stats import ForecastError

_NUM_RECENT = 256
_NUM_NEEDED = 20  # comparisons before which the factors are guesses
_NUM_NEAREST = 64  # comparisons that correct one forecast
_LEAST_S = 0.001
_EVERY = 8  # comparisons after which they count
_LATER = 1.25  # a request without a token counts as this many times later than when it was given up
_BROKEN = 0.03  # of the promises may be broken
_PACE = 0.04  # of the change of caution
_LEAST_CAUTION, _MOST_CAUTION = 0.1, 0.9  # nine of ten refused ones would miss; would be kept


@dataclass(frozen=True, slots=True)
class Factors:
    """Holds the factors of a raw forecast: for its median, for its ninth decile, and for the
    quantile on which a refusal rests."""

    median: float = 1.0
    p90: float = 1.5
    cautious: float = 1.2


class ForecastCalibration:
    """Calibrates one tier's forecasts, on the engine's thread. `factors`, `ratios` and
    `errors` are safe from any thread."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=_NUM_RECENT)  # log raw, ratio
        self._table: NDArray[np.float64] = np.zeros((0, 2))
        self._errors: deque[float] = deque(maxlen=_NUM_RECENT)
        self.num_compared = 0
        self.caution = 0.5  # the quantile on which a refusal rests

    def compare(self, raw_s: float, actual_s: float) -> None:
        """Adds a request that got its first token. `raw_s`: the forecast without factors."""
        actual_s = max(actual_s, _LEAST_S)
        self._errors.append(abs(1 - raw_s * self.factors(raw_s).median / actual_s))
        self._add(raw_s, actual_s)

    def compare_at_least(self, raw_s: float, waited_s: float) -> None:
        """Adds a request that ended while it waited for its first token."""
        self._add(raw_s, _LATER * max(waited_s, _LEAST_S))

    def _add(self, raw_s: float, actual_s: float) -> None:
        raw_s = max(raw_s, _LEAST_S)
        self._pairs.append((float(np.log(raw_s)), actual_s / raw_s))
        self.num_compared += 1
        if len(self._pairs) >= _NUM_NEEDED and self.num_compared % _EVERY == 0:
            self._table = np.array(self._pairs)

    def promise(self, *, is_kept: bool) -> None:
        """Notes the outcome of a request that could have been refused."""
        step = -_BROKEN if is_kept else 1 - _BROKEN
        self.caution = min(_MOST_CAUTION, max(_LEAST_CAUTION, self.caution + _PACE * step))

    def factors(self, raw_s: float) -> Factors:
        """Returns the factors for a raw forecast."""
        table = self._table
        if not len(table):
            return Factors()
        ratios = table[:, 1]
        if len(table) > _NUM_NEAREST:
            far = np.abs(table[:, 0] - np.log(max(raw_s, _LEAST_S)))
            ratios = ratios[np.argpartition(far, _NUM_NEAREST)[:_NUM_NEAREST]]
        count = len(ratios)
        shares = np.minimum(1.0, np.array([0.5, 0.9, self.caution]) * (count + 1) / count)
        shares[0] = 0.5
        return Factors(*np.quantile(ratios, shares).tolist())

    @property
    def ratios(self) -> tuple[float, ...]:
        """Actual over raw forecast, of the recent requests."""
        return tuple(ratio for _, ratio in tuple(self._pairs))

    @property
    def errors(self) -> tuple[float, ...]:
        """|forecast - actual| / actual of the recent requests."""
        return tuple(self._errors)


def error_of(calibrations: Iterable[ForecastCalibration]) -> ForecastError:
    """Returns the error over several tiers. `p90_ratio` is the ninth decile of all ratios."""
    calibrations = list(calibrations)
    ratios = np.array([ratio for each in calibrations for ratio in each.ratios])
    if not len(ratios):
        return ForecastError(p90_ratio=Factors().p90)
    errors = np.array([error for each in calibrations for error in each.errors])
    return ForecastError(
        num_compared=sum([each.num_compared for each in calibrations]),
        p90_ratio=float(np.quantile(ratios, 0.9)),
        median_error=float(np.median(errors)) if len(errors) else 0.0,
    )
