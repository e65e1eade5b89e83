"""The copies of a plan: their number on each device, and the load that one copy adds to its device.

S scenarios, L layers, E experts of a layer, D devices, C slots of the device that has most. Both
kinds of balance depend only on the share of an expert and its number of copies, so solvers, bounds
and reports differ between the kinds only through `CopyLoad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem


def copies_of(placement: Placement, layers: Sequence[int]) -> NDArray[np.int64]:
    """[L, E, D], of zeros and ones; layers in the order of `layers`."""
    copies_LED = np.zeros((len(layers), placement.num_experts, placement.num_ranks), dtype=np.int64)
    for row, layer in enumerate(layers):
        ranks_of = placement.ranks_of[layer]
        expert = np.repeat(np.arange(len(ranks_of)), [len(ranks) for ranks in ranks_of])
        copies_LED[row, expert, list(chain.from_iterable(ranks_of))] = 1
    return copies_LED


def copies_in_slots(slots_LDC: NDArray[np.int64], num_experts: int) -> NDArray[np.int64]:
    """Returns [L, E, D]: copies from the expert in each slot; -1 is an empty slot. An expert that
    is twice on a device counts twice."""
    num_layers, num_devices, _ = slots_LDC.shape
    copies_LED = np.zeros((num_layers, num_experts, num_devices), dtype=np.int64)
    layer, device, slot = np.nonzero(slots_LDC >= 0)
    np.add.at(copies_LED, (layer, slots_LDC[layer, device, slot], device), 1)
    return copies_LED


def placement_of(copies_LED: NDArray[np.int64], layers: Sequence[int]) -> Placement:
    """Makes a placement that names each device of an expert once, ascending."""
    num_experts, num_devices = copies_LED.shape[1:]
    ranks_of = {}
    for row, layer in enumerate(layers):
        counts_E = (copies_LED[row] > 0).sum(axis=1).tolist()
        ranks = iter(np.nonzero(copies_LED[row])[1].tolist())  # experts in order
        ranks_of[layer] = tuple(tuple(islice(ranks, count)) for count in counts_E)
    return Placement(num_ranks=num_devices, num_experts=num_experts, ranks_of=ranks_of)


def num_layers_with_repeats(copies_LED: NDArray[np.int64]) -> int:
    """Returns the number of layers in which a device holds an expert twice."""
    return int((copies_LED > 1).any(axis=(1, 2)).sum())


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
        """Makes the load for the kind of balance that the problem asks for."""
        if problem.balance == "tokens":
            return cls(shares_SLE=problem.loads.shares_SLE())
        assert problem.top_k is not None, "PlacementProblem checks that activated has top_k"
        return cls(
            shares_SLE=problem.loads.shares_SLE(),
            num_draws=float(problem.batch_size),
            top_k=problem.top_k,
        )

    def each(self, shares: Array, copies: NDArray[np.integer] | int) -> Array:
        """Returns the load of one copy, for shares and numbers of copies that broadcast."""
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
