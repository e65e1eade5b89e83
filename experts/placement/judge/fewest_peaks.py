"""The heaviest copy, when replicas go to whatever is heaviest: no other use of them is better.

S scenarios, L layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.copy_load import CopyLoad

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FewestPeaks:
    """`peak_HSL[h]` is the least that the heaviest copy can be, over its device's speed, with h
    replicas (or all that a layer has, if these are fewer). Replica h + 1 is of `expert_HSL[h]`, or
    of none (-1) where it could not help.

    An expert's r copies lie on r devices, so one of them is no faster than the r-th fastest.
    """

    peak_HSL: Floats
    expert_HSL: Ints
    replicas_L: Ints
    num_experts: int

    @classmethod
    def of(cls, load: CopyLoad, speed_D: Floats, replicas_L: Ints, most_copies: int) -> FewestPeaks:
        """`speed_D` descending; an expert may have `most_copies`."""
        shape = load.shares_SLE.shape
        rows_SL = np.ix_(range(shape[0]), range(shape[1]))
        num_steps = int(replicas_L.max(initial=0))
        copies_SLE = np.ones(shape, dtype=np.int64)
        heaviest_SLE = load.each(load.shares_SLE, 1) / speed_D[0]
        peak_HSL = np.empty((num_steps + 1, *shape[:2]))
        expert_HSL = np.full((num_steps + 1, *shape[:2]), -1, dtype=np.int64)
        for step in range(num_steps + 1):
            expert_SL = heaviest_SLE.argmax(axis=2)
            index = (*rows_SL, expert_SL)
            peak_HSL[step] = heaviest_SLE[index]
            more_SL = (copies_SLE[index] < most_copies) & (step < replicas_L)
            expert_HSL[step][more_SL] = expert_SL[more_SL]
            copies_SLE[index] += more_SL
            each_SL = load.each(load.shares_SLE[index], copies_SLE[index])
            # More copies may reach slower devices; an expert may leave some unused in this bound.
            over_speed_SL = each_SL / speed_D[copies_SLE[index] - 1]
            heaviest_SLE[index] = np.minimum(heaviest_SLE[index], over_speed_SL)
        return cls(
            peak_HSL=peak_HSL,
            expert_HSL=expert_HSL,
            replicas_L=replicas_L,
            num_experts=shape[2],
        )

    def last(self) -> Floats:
        """[S, L]: with all replicas of a layer."""
        return np.asarray(self.peak_HSL[-1])

    def copies(self, num_replicas: int, scenario: int, row: int) -> Ints:
        """[E]: of each expert, with so many replicas."""
        experts_H = self.expert_HSL[:num_replicas, scenario, row]
        return 1 + np.bincount(experts_H[experts_H >= 0], minlength=self.num_experts)
