"""The cost of a group of rows on an expert stage: a sum of concave functions of sums over its rows.

    activated experts   x = -log(1 - p)   f(s) = 1 - exp(-s)   expected number of experts with a row
    capacity C          x = p             f(s) = min(s, C)     an expert's rows beyond C are free

Both are sum_e f(sum_r x_r[e]); a search moves rows of x between groups. The first is exact for
probabilities p of independent choices, the second for choices that are known.

R rows, D dimensions (pairs of a layer and an expert, or a sample of them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

MOST_CERTAIN = 0.999


def sums_by_group(x_RD: Floats, group_R: NDArray[np.int64], num_groups: int) -> Floats:
    """Returns the sums of each group's rows, [G, D]. Rows of group -1 are left out."""
    is_in_GR = (np.arange(num_groups)[:, None] == group_R).astype(np.float32)
    return np.asarray(is_in_GR @ x_RD)


@dataclass(frozen=True, slots=True)
class ConcaveCost:
    """The cost function. A `capacity` of 1 counts activated experts."""

    capacity: int = 1

    def features(self, signatures_RD: Floats) -> Floats:
        """Returns the features x of probabilities."""
        if self.capacity > 1:
            return signatures_RD.astype(np.float32)
        certain = np.minimum(signatures_RD, np.float32(MOST_CERTAIN))
        return np.asarray(-np.log1p(-certain), dtype=np.float32)

    def total(self, sums_xD: Floats) -> Floats:
        """Returns the cost of groups whose rows sum up to `sums_xD`, one for each leading index."""
        if self.capacity > 1:
            return np.asarray(np.minimum(sums_xD, np.float32(self.capacity)).sum(axis=-1))
        spared_xD = np.exp(np.negative(sums_xD))
        num_dimensions = sums_xD.shape[-1]
        return np.asarray(num_dimensions - spared_xD @ np.ones(num_dimensions, np.float32))

    def with_each(self, x_RD: Floats) -> Callable[[Floats], Floats]:
        """Returns a function from a group's sums [D] to its cost [R] with each of these rows.
        Prepared once, each call is one product of a matrix and a vector."""
        if self.capacity > 1:
            return lambda sums_D: self.total(sums_D + x_RD)
        spare_RD = np.exp(np.negative(x_RD))
        return lambda sums_D: np.asarray(len(sums_D) - spare_RD @ np.exp(np.negative(sums_D)))
