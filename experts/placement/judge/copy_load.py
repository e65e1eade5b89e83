"""What one copy of an expert brings to its device, by how many copies the expert has.

S scenarios, L layers, E experts of a layer. Either balance is a function of the expert's share and
of its copies alone, so solvers, bounds and reports ask here and know no other difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.problem import PlacementProblem

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLoad:
    """`tokens`: the share over the copies. `activated`: the chance that a batch of B tokens reaches
    the copy, 1 - (1 - p / copies)^B, with p the chance that a token chooses the expert."""

    shares_SLE: Array  # sums of 1 in every layer
    num_draws: float | None = None  # B, for `activated`
    top_k: int = 1

    @classmethod
    def of(cls, problem: PlacementProblem) -> CopyLoad:
        """As the problem balances."""
        if problem.balance == "tokens":
            return cls(shares_SLE=problem.loads.shares_SLE())
        assert problem.top_k is not None, "the problem is checked"
        return cls(
            shares_SLE=problem.loads.shares_SLE(),
            num_draws=float(problem.batch_size),
            top_k=problem.top_k,
        )

    def each(self, shares: Array, copies: NDArray[np.integer] | int) -> Array:
        """Of one copy, for shares and numbers of copies that broadcast."""
        if self.num_draws is None:
            return shares / copies
        chance = np.minimum(shares * self.top_k, 1.0) / copies
        with np.errstate(divide="ignore"):  # log 0 of an expert that every token chooses: load 1
            return -np.expm1(self.num_draws * np.log1p(-chance))

    def totals(self) -> Array:
        """Of all devices, with one copy of each expert: what loads are measured against."""
        return np.asarray(self.each(self.shares_SLE, 1).sum(axis=2))
