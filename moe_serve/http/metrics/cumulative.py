"""Converts counts between bounds to Prometheus' cumulative counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """For bounds (1, 8) and counts (3, 2, 4): [("1.0", 3.0), ("8.0", 5.0), ("+Inf", 9.0)]."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, itertools.accumulate(counts)), strict=True))
