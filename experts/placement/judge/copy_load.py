"""Computes the load that one copy of an expert adds to its device, given the number of its copies.

S scenarios, L layers, E experts of a layer. Both kinds of balance depend only on the expert's share
and its number of copies, so solvers, bounds and reports differ between the kinds only through this
class.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.problem import PlacementProblem

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLoad:
    """The load of a copy. `tokens`: the share over the number of copies. `activated`: the
    probability that a batch of B tokens reaches the copy, 1 - (1 - p / copies)^B, where p is the
    probability that a token chooses the expert."""

    shares_SLE: Array  # sum to 1 in every layer
    num_draws: float | None = None  # B, for `activated`
    top_k: int = 1

    @classmethod
    def of(cls, problem: PlacementProblem) -> CopyLoad:
        """Make the load for the kind of balance that the problem asks for."""
        if problem.balance == "tokens":
            return cls(shares_SLE=problem.loads.shares_SLE())
        assert problem.top_k is not None, "PlacementProblem checks that activated has top_k"
        return cls(
            shares_SLE=problem.loads.shares_SLE(),
            num_draws=float(problem.batch_size),
            top_k=problem.top_k,
        )

    def each(self, shares: Array, copies: NDArray[np.integer] | int) -> Array:
        """Return the load of one copy, for shares and numbers of copies that broadcast."""
        if self.num_draws is None:
            return shares / copies
        chance = np.minimum(shares * self.top_k, 1.0) / copies
        # an expert that every token chooses gives log 0, and load 1
        with np.errstate(divide="ignore"):
            return -np.expm1(self.num_draws * np.log1p(-chance))

    def totals(self) -> Array:
        """Total load of all devices with one copy of each expert, the reference for relative
        loads."""
        return np.asarray(self.each(self.shares_SLE, 1).sum(axis=2))
