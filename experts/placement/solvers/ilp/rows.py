"""Constraints of a program: low <= A x <= high."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Term = tuple[NDArray[np.int64], NDArray[np.floating] | float]  # variables, a factor or factors


@dataclass(slots=True)
class Rows:
    """Collects constraints low <= A x <= high entry by entry."""

    row: list[NDArray[np.int64]] = field(default_factory=list)
    column: list[NDArray[np.int64]] = field(default_factory=list)
    value: list[NDArray[np.float64]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[Term], low: float, high: float) -> None:
        """Add one constraint."""
        for variables, factors in terms:
            flat = np.ravel(variables)
            self.row.append(np.full(len(flat), len(self.low)))
            self.column.append(flat)
            self.value.append(np.broadcast_to(np.ravel(np.asarray(factors, float)), flat.shape))
        self.low.append(low)
        self.high.append(high)
