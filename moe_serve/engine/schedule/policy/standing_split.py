"""A split that persists between steps.

It changes where sequences come, go or get a new signature, and is improved a little in every step
until no improvement is left.

R rows (sequences that compute one token each), D dimensions, G groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.schedule.policy.concave_cost import ConcaveCost, Floats, sums_by_group
from moe_serve.engine.schedule.policy.local_search import Groups, LocalSearch, SizeLimits
from moe_serve.engine.schedule.policy.signature_table import SignatureTable

_MAX_NEW_SHARE = 0.5  # if more sequences are new, the split is made anew
_ROUNDS_OF_A_ROW = 256  # 1 round with 256 sequences, 4 with 64
_NUM_ITERATIONS = 8  # of the power iteration


class StandingSplit:
    """The split for one number of groups. `cost` and `table` are the policy's."""

    def __init__(self, num_groups: int, cost: ConcaveCost, table: SignatureTable) -> None:
        self._num_groups, self._cost, self._table = num_groups, cost, table
        self._group: dict[int, int] = {}  # sequence id -> its group
        self._settled: tuple[int, frozenset[int]] | None = None  # its signatures and ids
        self.cost_total = 0.0  # of all groups, as of the last update

    def update(
        self,
        sequence_ids: Items[int],
        fixed_GD: Floats,
        fixed_sizes: NDArray[np.int64],
        limits: SizeLimits,
    ) -> list[int]:
        """Returns the group of each sequence. `fixed_GD` and `fixed_sizes` describe the other
        contents of the groups."""
        state = (self._table.stamp(sequence_ids), frozenset(sequence_ids))
        if self._settled == state and not fixed_sizes.any():
            return [self._group[key] for key in sequence_ids]
        x_RD = self._table.rows(sequence_ids)
        group_R = self._start(sequence_ids, x_RD, fixed_GD, fixed_sizes)
        search = LocalSearch(self._cost, x_RD, group_R, fixed_GD, fixed_sizes, limits)
        search.balance()
        is_done = search.run(max(1, _ROUNDS_OF_A_ROW // max(1, len(sequence_ids))))
        self._settled = state if is_done and not fixed_sizes.any() else None
        self.cost_total = search.total
        groups: list[int] = search.group_R.tolist()
        self._group |= dict(zip(sequence_ids, groups, strict=True))
        return groups

    def sums(self, sequence_ids: Items[int]) -> tuple[Floats, NDArray[np.int64]]:
        """Returns the features [G, D] and sizes [G] of the groups of these sequences. New ones join
        the smallest group."""
        x_RD = self._table.rows(sequence_ids)
        known = np.array([self._group.get(key, -1) for key in sequence_ids], dtype=np.int64)
        sums_GD = sums_by_group(x_RD, known, self._num_groups)
        sizes_G = np.bincount(known[known >= 0], minlength=self._num_groups)
        for row in np.flatnonzero(known < 0):
            group = int(sizes_G.argmin())
            sums_GD[group] += x_RD[row]
            sizes_G[group] += 1
        return sums_GD, sizes_G

    def expect(self, sequence_id: int, group: int) -> None:
        """Records that a sequence that starts now was chosen to suit this group."""
        self._group[sequence_id] = group

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for key in sequence_ids:
            self._group.pop(key, None)

    def _start(
        self,
        sequence_ids: Items[int],
        x_RD: Floats,
        fixed_GD: Floats,
        fixed_sizes: NDArray[np.int64],
    ) -> Groups:
        """Returns the current groups. New sequences join the smallest group where they cost
        least."""
        group_R = np.array([self._group.get(key, -1) for key in sequence_ids], dtype=np.int64)
        new = np.flatnonzero(group_R < 0)
        if len(new) > _MAX_NEW_SHARE * len(group_R) and not fixed_sizes.any():
            return first_split(x_RD, self._num_groups)
        sizes_G = fixed_sizes + np.bincount(group_R[group_R >= 0], minlength=self._num_groups)
        sums_GD = fixed_GD + sums_by_group(x_RD, group_R, self._num_groups)
        for row in new:
            smallest = np.flatnonzero(sizes_G == sizes_G.min())
            added = self._cost.total(sums_GD[smallest] + x_RD[row])
            group = int(smallest[(added - self._cost.total(sums_GD[smallest])).argmin()])
            group_R[row] = group
            sums_GD[group] += x_RD[row]
            sizes_G[group] += 1
        return group_R


def first_split(x_RD: Floats, num_groups: int) -> Groups:
    """Sorts rows along their principal axis and cuts them into equal groups. O(R D + R log R)."""
    centred_RD = x_RD - x_RD.mean(axis=0)
    lengths = np.linalg.norm(centred_RD, axis=1)
    axis_D = centred_RD[int(lengths.argmax())]
    for _ in range(_NUM_ITERATIONS):
        axis_D = centred_RD.T @ (centred_RD @ axis_D)
        length = float(np.linalg.norm(axis_D))
        if length < 1e-12:
            break  # all rows are alike
        axis_D = axis_D / length
    order = np.argsort(centred_RD @ axis_D, kind="stable")
    group_R = np.empty(len(x_RD), dtype=np.int64)
    group_R[order] = np.arange(len(x_RD)) * num_groups // len(x_RD)
    return group_R
