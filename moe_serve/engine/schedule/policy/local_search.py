"""Improves a split by exchanging rows between two groups at a time.

Each round takes one pair of groups, computes what each of their rows would save on the other side
(all rows at once), tries the best rows of both sides against each other, and makes the one move or
exchange that saves most. The number of rounds and so the time is bounded; the next step continues.

R rows of one token each, D dimensions, G groups, W the best rows of a side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.schedule.policy.concave_cost import ConcaveCost, Floats
from moe_serve.engine.schedule.policy.group_sums import group_sums

_WORTH_IT = 1e-3  # least savings of a change, in experts
_NUM_WILLING = 16

Groups = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """Minimum and maximum tokens of each group, inclusive."""

    low: int
    high: int

    @staticmethod
    def near(balanced_sizes: Sequence[int], tolerance: float) -> SizeLimits:
        """Returns limits within `tolerance` of a balanced split's smallest and largest group. No
        group may be empty."""
        low, high = min(balanced_sizes), max(balanced_sizes)
        assert low >= 1, f"a balanced split has groups of {list(balanced_sizes)} tokens"
        return SizeLimits(max(1, low - int(low * tolerance)), high + int(high * tolerance))

    def allow(self, smaller: int, larger: int) -> bool:
        """Returns whether a group that has shrunk and one that has grown are within the limits."""
        return smaller >= self.low and larger <= self.high


@dataclass(frozen=True, slots=True)
class Change:
    """Rows that change sides: one in a move, one of each side in an exchange."""

    saved: float
    rows: tuple[int, ...]


class LocalSearch:
    """A split under search: the rows' groups and the groups' sums. `fixed_GD` and `fixed_sizes`
    describe the other contents of the groups, which stay there."""

    def __init__(
        self,
        cost: ConcaveCost,
        x_RD: Floats,
        group_R: Groups,
        fixed_GD: Floats,
        fixed_sizes: NDArray[np.int64],
        limits: SizeLimits,
    ) -> None:
        self._limits = limits
        self.group_R = group_R.copy()
        self._sums = group_sums(cost, x_RD, group_R, fixed_GD)
        self.sizes_G = fixed_sizes + np.bincount(group_R, minlength=len(fixed_sizes))
        self._movable_G = np.bincount(group_R, minlength=len(fixed_sizes))

    @property
    def total(self) -> float:
        return self._sums.total()

    def run(self, max_rounds: int) -> bool:
        """Improves the split. Returns whether no pair of groups can be improved further."""
        idle = 0
        pairs = list(itertools.combinations(range(len(self.sizes_G)), 2))
        for a, b in itertools.islice(_endless(pairs), max_rounds):
            change = self._best(a, b)
            idle = 0 if change else idle + 1
            if change:
                self._apply(change, a, b)
            if idle == len(pairs):
                return True
        return not pairs

    def balance(self) -> None:
        """Moves rows until all groups are within the limits, the cheapest first."""
        limits = self._limits
        while self.sizes_G.min() < limits.low or self.sizes_G.max() > limits.high:
            small = int(self.sizes_G.argmin())
            large = int(np.where(self._movable_G > 0, self.sizes_G, -1).argmax())
            if self.sizes_G[large] - self.sizes_G[small] < 2:
                return  # as equal as the fixed contents allow
            rows = np.flatnonzero(self.group_R == large)
            saved = self._sums.saved(rows, large, small)
            self._apply(Change(0.0, (int(rows[saved.argmax()]),)), large, small)

    def _best(self, a: int, b: int) -> Change | None:
        rows_a, rows_b = np.flatnonzero(self.group_R == a), np.flatnonzero(self.group_R == b)
        saved_a, saved_b = self._sums.saved(rows_a, a, b), self._sums.saved(rows_b, b, a)
        best: Change | None = None
        for rows, saved, source, target in ((rows_a, saved_a, a, b), (rows_b, saved_b, b, a)):
            shrunk, grown = int(self.sizes_G[source]) - 1, int(self.sizes_G[target]) + 1
            if len(rows) and self._limits.allow(shrunk, grown):
                best = _better(best, Change(float(saved.max()), (int(rows[saved.argmax()]),)))
        if len(rows_a) and len(rows_b):
            exchange = self._exchange(rows_a[_willing(saved_a)], rows_b[_willing(saved_b)], a, b)
            best = _better(best, exchange)
        return best if best is not None and best.saved > _WORTH_IT else None

    def _exchange(self, rows_a: Groups, rows_b: Groups, a: int, b: int) -> Change:
        saved = self._sums.exchanged(rows_a, rows_b, a, b)
        i, j = divmod(int(saved.argmax()), len(rows_b))
        return Change(float(saved[i, j]), (int(rows_a[i]), int(rows_b[j])))

    def _apply(self, change: Change, a: int, b: int) -> None:
        for row in change.rows:
            source = int(self.group_R[row])
            target = b if source == a else a
            self.group_R[row] = target
            self._sums.move(row, source, target)
            for sizes in (self.sizes_G, self._movable_G):
                sizes[source] -= 1
                sizes[target] += 1


def _willing(saved: Floats) -> Groups:
    if len(saved) <= _NUM_WILLING:
        return np.arange(len(saved))
    return np.argpartition(-saved, _NUM_WILLING)[:_NUM_WILLING]


def _better(one: Change | None, other: Change) -> Change:
    return other if one is None or other.saved > one.saved else one


def _endless(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    return itertools.cycle(pairs)
