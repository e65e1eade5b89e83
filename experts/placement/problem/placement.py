"""A placement: for every sparse layer, the expert ranks that hold each expert.

T rows, K choices per row, E experts of a layer, R ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement_error import PlacementError
from experts.placement.replicas.replica_choice import ReplicaChoice

RanksOf = tuple[tuple[int, ...], ...]  # expert -> ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LostExpert:
    """An expert that no rank holds."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The ranks of every expert, checked on construction: ranks are in range, an expert names no
    rank twice, and every layer has E experts.

    Only `without` makes a placement in which an expert is on no rank (`lost`); placement files
    never contain one.
    """

    num_ranks: int
    num_experts: int
    ranks_of: Mapping[int, RanksOf]  # sparse layer -> expert -> ranks, the preferred one first

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_experts < 1:
            raise PlacementError(
                f"num_experts and num_ranks must be 1 or more, got {self.num_experts} experts on "
                f"{self.num_ranks} ranks."
            )
        for layer, experts in self.ranks_of.items():
            if len(experts) != self.num_experts:
                raise PlacementError(
                    f"Layer {layer} places {len(experts)} experts; num_experts is "
                    f"{self.num_experts}."
                )
            for expert, ranks in enumerate(experts):
                # fast path for the common case of one valid rank
                if len(ranks) != 1 or not 0 <= ranks[0] < self.num_ranks:
                    self._check_ranks(layer, expert, ranks)

    def _check_ranks(self, layer: int, expert: int, ranks: tuple[int, ...]) -> None:
        strangers = [rank for rank in ranks if not 0 <= rank < self.num_ranks]
        if strangers:
            raise PlacementError(
                f"Layer {layer} puts expert {expert} on rank {strangers[0]}; ranks are 0 to "
                f"{self.num_ranks - 1}."
            )
        if len(set(ranks)) < len(ranks):
            raise PlacementError(
                f"Layer {layer} puts expert {expert} twice on one rank: {list(ranks)}."
            )

    @property
    def lost(self) -> list[LostExpert]:
        """Experts that no rank holds."""
        return [
            LostExpert(layer=layer, expert=expert)
            for layer, experts in self.ranks_of.items()
            for expert, ranks in enumerate(experts)
            if not ranks
        ]

    def held_by(self, rank: int) -> dict[int, list[int]]:
        """Returns, for every sparse layer, the experts that a rank holds, ascending."""
        assert 0 <= rank < self.num_ranks, f"rank must be 0 to {self.num_ranks - 1}, got {rank}"
        return {
            layer: [expert for expert, ranks in enumerate(experts) if rank in ranks]
            for layer, experts in self.ranks_of.items()
        }

    def without(self, ranks: Collection[int]) -> Placement:
        """Returns the placement without some ranks; the others keep their numbers. See `lost`."""
        return replace(
            self,
            ranks_of={
                layer: tuple(
                    tuple(rank for rank in holders if rank not in ranks) for holders in experts
                )
                for layer, experts in self.ranks_of.items()
            },
        )

    def with_lost_given_to(self, survivors: Collection[int]) -> Placement:
        """Returns a placement with every lost expert on one of `survivors`: in its layer the one
        with the fewest experts, then the one that took over the fewest, then the lowest number.

        Worked example, one layer, ranks [0], [0], [1], [], [] and survivors 0, 1: the first lost
        expert goes to 1 (it has one), the second to 0 (two each, but 1 has taken one over already).
        """
        present = sorted(set(survivors))
        assert present or not self.lost, f"{len(self.lost)} lost experts and no survivor"
        taken = dict.fromkeys(present, 0)
        ranks_of = {}
        for layer, experts in self.ranks_of.items():
            counts = {rank: sum(rank in holders for holders in experts) for rank in present}
            given = []
            for holders in experts:
                if not holders:
                    rank = min(present, key=lambda r: (counts[r], taken[r], r))
                    counts[rank] += 1
                    taken[rank] += 1
                    holders = (rank,)
                given.append(holders)
            ranks_of[layer] = tuple(given)
        return replace(self, ranks_of=ranks_of)

    def choice(self, layer: int) -> ReplicaChoice:
        """Returns the table that says which rank serves which row of a layer; callers may keep
        it."""
        return ReplicaChoice.of(layer, self.ranks_of[layer])

    def assign(self, layer: int, expert_ids_TK: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rank [T, K] that serves each choice of rows 0 .. T - 1."""
        return self.choice(layer).ranks(expert_ids_TK, np.arange(len(expert_ids_TK)))

    def check_fits(self, sparse_layers: Sequence[int], num_experts: int, num_ranks: int) -> None:
        """Raises PlacementError unless the placement is for this model on these ranks."""
        if (self.num_experts, self.num_ranks) != (num_experts, num_ranks):
            raise PlacementError(
                f"The placement is for {self.num_experts} experts on {self.num_ranks} "
                f"ranks, but the model has {num_experts} on {num_ranks}."
            )
        missing = sorted(set(sparse_layers) - self.ranks_of.keys())
        strangers = sorted(self.ranks_of.keys() - set(sparse_layers))
        if missing or strangers:
            raise PlacementError(
                f"The placement has {len(self.ranks_of)} layers, but the model has "
                f"{len(sparse_layers)} with routed experts; missing are {missing}, not in "
                f"the model are {strangers}."
            )


def contiguous(sparse_layers: Sequence[int], num_experts: int, num_ranks: int) -> Placement:
    """Returns a placement of consecutive runs of experts; ranks differ by at most one expert, and
    none is empty."""
    if not 1 <= num_ranks <= num_experts:
        raise PlacementError(
            f"num_ranks must be 1 to {num_experts}, the number of experts, got {num_ranks} expert "
            "ranks."
        )
    ranks = tuple((expert * num_ranks // num_experts,) for expert in range(num_experts))
    return Placement(
        num_ranks=num_ranks, num_experts=num_experts, ranks_of=dict.fromkeys(sparse_layers, ranks)
    )
