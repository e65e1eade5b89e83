"""Least squares with coefficients of 0 or more: no stage gets faster with more work."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fit. `errors`: predicted / measured - 1 of each measurement."""

    coefficients: tuple[float, ...]
    r_squared: float
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        return float(np.median(np.abs(self.errors)))

    @property
    def max_error(self) -> float:
        return float(np.max(np.abs(self.errors)))


def fit(columns: Array, seconds: Array) -> Fit:
    """Fits `columns` [N, C] times coefficients [C] to `seconds` [N], all greater than 0.

    Minimises relative errors: a step of a millisecond matters as much as one of a second. With few
    columns all subsets are tried, which is exact and needs no tolerance.
    """
    num_columns = columns.shape[1]
    assert columns.shape[0] == len(seconds) > 0, f"{columns.shape} for {len(seconds)} measurements"
    assert num_columns <= 6, f"{num_columns} columns have too many subsets"
    best, least = np.zeros(num_columns), np.inf
    weighted, ones = columns / seconds[:, None], np.ones(len(seconds))
    for size in range(1, num_columns + 1):
        for subset in itertools.combinations(range(num_columns), size):
            part = weighted[:, subset]
            found = np.linalg.lstsq(part, ones, rcond=None)[0]
            loss = float(np.square(part @ found - 1).sum())
            if (found >= 0).all() and loss < least:
                least, best = loss, np.zeros(num_columns)
                best[list(subset)] = found
    predicted = columns @ best
    spread = float(np.square(seconds - seconds.mean()).sum())
    rest = float(np.square(seconds - predicted).sum())
    return Fit(
        coefficients=tuple(best.tolist()),
        r_squared=1.0 if spread == 0 else 1 - rest / spread,
        errors=tuple((predicted / seconds - 1).tolist()),
    )
