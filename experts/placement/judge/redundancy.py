"""Computes how many replicas a target balance takes: the bound for each number of replicas, in one
pass.

S scenarios, L layers, D devices; H replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.bound import FewestPeaks
from experts.placement.judge.copy_load import CopyLoad
from experts.placement.problem.problem import PlacementProblem

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """Upper bounds of the balancedness by number of replicas.

    No plan with h replicas of a layer is better balanced than `best_H[h]`, the mean over layers and
    scenarios of mean / largest load. Only the hottest expert is considered, so real plans reach a
    little less.
    """

    best_H: Floats
    hottest_share: float  # share of the hottest expert in the worst layer and scenario
    hottest_over_even: float  # the same, over the even load of a device

    @classmethod
    def of(cls, problem: PlacementProblem, most: int | None = None) -> Redundancy:
        """Compute the bounds for up to `most` replicas in a layer; by default as many as the
        problem has, or twice its devices if that is more."""
        load = CopyLoad.of(problem)
        speed_D = np.array([device.speed for device in problem.devices.devices])
        if most is None:
            most = max(problem.num_replicas, 2 * len(speed_D))
        replicas_L = np.full(load.shares_SLE.shape[1], most)
        peaks = FewestPeaks.of(load, np.sort(speed_D)[::-1], replicas_L, len(speed_D))
        even_SL = load.totals() / speed_D.sum()
        best_HSL = 1.0 / np.maximum(peaks.peak_HSL / even_SL, 1.0)
        return cls(
            best_H=best_HSL.mean(axis=(1, 2)),
            hottest_share=float(load.shares_SLE.max()),
            hottest_over_even=float((peaks.peak_HSL[0] / even_SL).max()),
        )

    def needed(self, target: float) -> int | None:
        """Return the fewest replicas of a layer with which `target` is not excluded; None if more
        than the examined number are needed."""
        enough = np.flatnonzero(self.best_H >= target)
        return int(enough[0]) if len(enough) else None
