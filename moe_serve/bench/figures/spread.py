"""Summarises a latency: its mean and percentiles, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 95, 99)
# The quantiles a report keeps, enough to draw a distribution: every half percent.
QUANTILE_STEPS = tuple(i / 200 for i in range(201))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and percentiles of a latency. Percentiles between two values are interpolated, as numpy
    does by default."""

    num: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values_s: Sequence[float] | np.ndarray) -> Spread | None:
        """Computes the spread of values in seconds; None if there are none."""
        if len(values_s) == 0:
            return None
        values_ms = np.asarray(values_s, dtype=np.float64) * 1e3
        p50, p90, p95, p99 = np.percentile(values_ms, PERCENTILES)
        return cls(
            num=len(values_ms),
            mean=float(values_ms.mean()),
            p50=float(p50),
            p90=float(p90),
            p95=float(p95),
            p99=float(p99),
            max=float(values_ms.max()),
        )


def quantiles_ms(values_s: Sequence[float] | np.ndarray) -> list[float]:
    """Returns the quantiles at QUANTILE_STEPS; empty if there are no values."""
    if len(values_s) == 0:
        return []
    values_ms = np.asarray(values_s, dtype=np.float64) * 1e3
    return [round(float(value), 4) for value in np.quantile(values_ms, QUANTILE_STEPS)]
