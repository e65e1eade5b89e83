"""Distributes the counted rows over expert ranks under the current placement.

L layers, E experts, K ranks. The rows of an expert are shared evenly among its copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.placement import Placement
from moe_serve.engine.schedule.policy.rank_load import RankLoads


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShares:
    """The load of the expert ranks. None: no row was counted."""

    shares: tuple[float, ...] | None  # of all rows, by rank
    balance: float | None  # mean over max load of the ranks, mean over layers
    num_replicas: int  # copies of experts beyond the first


class RankSharer:
    """Computes the shares and caches what it derived from a placement. Not thread-safe."""

    def __init__(self) -> None:
        self._placement: Placement | None = None
        self._loads: RankLoads | None = None
        self._num_replicas = 0

    def of(self, placement: Placement, rows_LE: NDArray[np.int64]) -> RankShares:
        loads = self._follow(placement)
        rows_LK = loads.of(rows_LE.ravel().astype(np.float32), 1)
        total, most_L = rows_LK.sum(), rows_LK.max(axis=1)
        if not total:
            return RankShares(shares=None, balance=None, num_replicas=self._num_replicas)
        is_used_L = most_L > 0
        balance = (rows_LK.mean(axis=1)[is_used_L] / most_L[is_used_L]).mean()
        shares = rows_LK.sum(axis=0) / total
        return RankShares(
            shares=tuple(shares.tolist()),
            balance=float(balance),
            num_replicas=self._num_replicas,
        )

    def _follow(self, placement: Placement) -> RankLoads:
        if self._loads is None:
            self._loads = RankLoads(placement)
        if placement is not self._placement:
            self._loads.use(placement)
            holders = [ranks for experts in placement.ranks_of.values() for ranks in experts]
            self._num_replicas = sum(max(0, len(ranks) - 1) for ranks in holders)
            self._placement = placement
        return self._loads
