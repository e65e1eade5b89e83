"""The feature sums of groups while rows move between them, and the savings of each move.

For activated experts the cost of a group is D - sum_d prod_r exp(-x_r[d]), so moves only multiply
and divide, and the savings of all rows are a product of a matrix and a vector.

R rows, D dimensions, G groups, W some of the rows.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.schedule.policy.concave_cost import ConcaveCost, Floats, sums_by_group

_LARGEST_SUM = 80.0  # exp(-80) is still a normal number


class GroupSums(Protocol):
    """The interface that a search uses, for one cost."""

    def total(self) -> float:
        """Returns the cost of all groups."""
        ...

    def saved(self, rows_W: NDArray[np.int64], source: int, target: int) -> Floats:
        """Returns [W]: the savings of moving each row."""
        ...

    def exchanged(
        self, rows_a: NDArray[np.int64], rows_b: NDArray[np.int64], a: int, b: int
    ) -> Floats:
        """Returns [Wa, Wb]: the savings of exchanging each pair."""
        ...

    def move(self, row: int, source: int, target: int) -> None: ...


def group_sums(
    cost: ConcaveCost, x_RD: Floats, group_R: NDArray[np.int64], fixed_GD: Floats
) -> GroupSums:
    """Builds the sums for a cost. `fixed_GD` are the sums of what is in the groups beside the
    rows."""
    sums_GD = fixed_GD + sums_by_group(x_RD, group_R, len(fixed_GD))
    if cost.capacity == 1:
        return _ActivatedSums(x_RD, sums_GD)
    return _PlainSums(cost, x_RD, sums_GD)


class _ActivatedSums:
    """Sums for activated experts: the probability, per group, that an expert is not used."""

    def __init__(self, x_RD: Floats, sums_GD: Floats) -> None:
        self._x_RD, self._sums_GD = x_RD, sums_GD
        self._spare_RD = np.exp(-x_RD)  # at least 1e-3: see the cost
        self._undo_RD = 1 / self._spare_RD
        self._spared_GD = np.exp(-np.minimum(sums_GD, _LARGEST_SUM))
        self._spared_G = self._spared_GD.sum(axis=1)

    def total(self) -> float:
        return float(self._spared_GD.size - self._spared_GD.sum())

    def saved(self, rows_W: NDArray[np.int64], source: int, target: int) -> Floats:
        left = self._undo_RD[rows_W] @ self._spared_GD[source]
        joined = self._spare_RD[rows_W] @ self._spared_GD[target]
        return np.asarray(left + joined - self._spared_G[source] - self._spared_G[target])

    def exchanged(
        self, rows_a: NDArray[np.int64], rows_b: NDArray[np.int64], a: int, b: int
    ) -> Floats:
        in_a = (self._undo_RD[rows_a] * self._spared_GD[a]) @ self._spare_RD[rows_b].T
        in_b = (self._spare_RD[rows_a] * self._spared_GD[b]) @ self._undo_RD[rows_b].T
        return np.asarray(in_a + in_b - self._spared_G[a] - self._spared_G[b])

    def move(self, row: int, source: int, target: int) -> None:
        for group, x_D in ((source, -self._x_RD[row]), (target, self._x_RD[row])):
            self._sums_GD[group] += x_D
            self._spared_GD[group] = np.exp(-np.minimum(self._sums_GD[group], _LARGEST_SUM))
            self._spared_G[group] = self._spared_GD[group].sum()


class _PlainSums:
    """Sums for any concave cost."""

    def __init__(self, cost: ConcaveCost, x_RD: Floats, sums_GD: Floats) -> None:
        self._cost, self._x_RD, self._sums_GD = cost, x_RD, sums_GD

    def total(self) -> float:
        return float(self._cost.total(self._sums_GD).sum())

    def saved(self, rows_W: NDArray[np.int64], source: int, target: int) -> Floats:
        x_WD, sums_GD, total = self._x_RD[rows_W], self._sums_GD, self._cost.total
        left, joined = total(sums_GD[source] - x_WD), total(sums_GD[target] + x_WD)
        return np.asarray(total(sums_GD[source]) + total(sums_GD[target]) - left - joined)

    def exchanged(
        self, rows_a: NDArray[np.int64], rows_b: NDArray[np.int64], a: int, b: int
    ) -> Floats:
        moved_WWD = self._x_RD[rows_b][None] - self._x_RD[rows_a][:, None]
        sums_GD, total = self._sums_GD, self._cost.total
        after = total(sums_GD[a] + moved_WWD) + total(sums_GD[b] - moved_WWD)
        return np.asarray(total(sums_GD[a]) + total(sums_GD[b]) - after)

    def move(self, row: int, source: int, target: int) -> None:
        self._sums_GD[source] -= self._x_RD[row]
        self._sums_GD[target] += self._x_RD[row]
