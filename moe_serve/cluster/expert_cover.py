"""Who holds which expert: as placed, and who stands in while a rank is away. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from moe_serve.errors import ConfigError

Placed = Mapping[int, Sequence[Sequence[int]]]  # layer -> expert -> ranks
Held = dict[int, list[int]]  # layer -> experts


@dataclass(frozen=True, slots=True)
class Cover:
    """Every expert on ranks that are there, and what each of them must load beside its own."""

    ranks_of: dict[int, list[list[int]]]
    extra: dict[int, Held]  # by rank; those that need nothing are not in it


def held_by(placed: Placed, rank: int) -> Held:
    """The experts that a placement gives to a rank."""
    return {
        layer: [expert for expert, ranks in enumerate(experts) if rank in ranks]
        for layer, experts in placed.items()
    }


def cover(placed: Placed, alive: Collection[int]) -> Cover:
    """Replicas serve where there are any; an expert without goes to the rank with fewest.

    Worked example: experts 0 to 3 on ranks [0], [0, 1], [1], [2], and rank 2 is away: expert 3 goes
    to rank 0 or 1, which hold two each; the lower number wins.
    """
    present = sorted(alive)
    assert present, "no expert rank is alive"
    ranks_of: dict[int, list[list[int]]] = {}
    extra: dict[int, Held] = {}
    for layer, experts in placed.items():
        serving = [[rank for rank in ranks if rank in alive] for ranks in experts]
        counts = {rank: sum(rank in ranks for ranks in serving) for rank in present}
        for expert, ranks in enumerate(serving):
            if not ranks:
                rank = min(present, key=lambda item: (counts[item], item))
                counts[rank] += 1
                ranks.append(rank)
                extra.setdefault(rank, {}).setdefault(layer, []).append(expert)
        ranks_of[layer] = serving
    return Cover(ranks_of, extra)


def renumbered(ranks_of: Placed, members: Sequence[int]) -> dict[int, list[list[int]]]:
    """Ranks by their place among the members of an epoch."""
    place = {rank: index for index, rank in enumerate(members)}
    return {
        layer: [[place[rank] for rank in ranks] for ranks in experts]
        for layer, experts in ranks_of.items()
    }


def contiguous(layers: Sequence[int], num_experts: int, num_ranks: int) -> Placed:
    """Equal runs of experts; sizes differ by one at most. Raises ConfigError if some get none."""
    if num_ranks > num_experts:
        raise ConfigError(
            f"{num_ranks} expert ranks are more than the model's {num_experts} experts: use at "
            f"most {num_experts}."
        )
    ranks = [[expert * num_ranks // num_experts] for expert in range(num_experts)]
    return dict.fromkeys(layers, ranks)
