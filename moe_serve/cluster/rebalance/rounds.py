"""A plan in rounds: some layers at a time, as many as fit into the free slots of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experts.placement.errors import PlacementError
from experts.placement.problem.placement import Placement, RanksOf
from moe_serve.cluster.members.expert_cover import Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One step on the way: what changes with it, and for whom."""

    placement: Placement  # whole, as it is afterwards
    ranks_of: Mapping[int, RanksOf]  # of the layers that change
    held: Sequence[Held]  # by rank, in these layers
    gained: Sequence[Held]  # of that, what the rank did not hold before

    @property
    def num_copies(self) -> int:
        """That are read for it."""
        return sum(map(num_copies, self.gained))

    @property
    def most_copies(self) -> int:
        """That one rank reads for it."""
        return max(map(num_copies, self.gained))


def rounds(before: Placement, after: Placement, room: int) -> list[Round]:
    """The way from one placement to another; none where nothing changes. No rank gains more than
    `room` copies in a round; raises PlacementError if it does in a single layer.

    Worked example, room for 2: layers 0 and 1 give rank 0 one copy each, layer 2 gives it two.
    The first round has layers 0 and 1, the second layer 2.
    """
    found: list[Round] = []
    layers, taken = list[int](), [0] * before.num_ranks
    for layer in changed_layers(before, after):
        counts = [len(experts) for experts in gained_in(layer, before, after)]
        if max(counts) > room:
            rank = counts.index(max(counts))
            raise PlacementError(
                f"Layer {layer} gives rank {rank} {counts[rank]} copies at once; {room} fit."
            )
        if any(t + c > room for t, c in zip(taken, counts, strict=True)):
            found.append(_round(before, after, layers, found))
            layers, taken = [], [0] * before.num_ranks
        layers.append(layer)
        taken = [t + c for t, c in zip(taken, counts, strict=True)]
    return [*found, _round(before, after, layers, found)] if layers else []


def changed_layers(before: Placement, after: Placement) -> list[int]:
    """Those in which a copy comes or goes; the order of an expert's ranks alone is no change."""
    return [
        layer
        for layer, experts in sorted(before.ranks_of.items())
        if [set(ranks) for ranks in experts] != [set(ranks) for ranks in after.ranks_of[layer]]
    ]


def gained_in(layer: int, before: Placement, after: Placement) -> list[list[int]]:
    """By rank: the experts of a layer that it holds afterwards and not before."""
    of_rank: list[list[int]] = [[] for _ in range(before.num_ranks)]
    pairs = zip(before.ranks_of[layer], after.ranks_of[layer], strict=True)
    for expert, (old, new) in enumerate(pairs):
        for rank in new:
            if rank not in old:
                of_rank[rank].append(expert)
    return of_rank


def num_copies(held: Held) -> int:
    return sum(map(len, held.values()))


def _round(
    before: Placement, after: Placement, layers: Sequence[int], earlier: Sequence[Round]
) -> Round:
    at = earlier[-1].placement if earlier else before
    changes = {layer: after.ranks_of[layer] for layer in layers}
    held: list[Held] = [{layer: [] for layer in layers} for _ in range(before.num_ranks)]
    gained: list[Held] = [{} for _ in range(before.num_ranks)]
    for layer, experts in changes.items():
        for expert, ranks in enumerate(experts):
            for rank in ranks:
                held[rank][layer].append(expert)
        for rank, ids in enumerate(gained_in(layer, before, after)):
            if ids:
                gained[rank][layer] = ids
    placement = replace(at, ranks_of={**at.ranks_of, **changes})
    return Round(placement=placement, ranks_of=changes, held=held, gained=gained)
