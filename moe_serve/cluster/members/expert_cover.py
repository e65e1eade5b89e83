"""Chooses the ranks that stand in for lost expert ranks, and the experts they must load."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from experts.placement.problem.placement import Placement

Held = dict[int, list[int]]  # layer -> experts


def covered(placement: Placement, alive: Collection[int]) -> Placement:
    """Returns the placement on the ranks alive: replicas serve where there are any."""
    away = set(range(placement.num_ranks)) - set(alive)
    return placement.without(away).with_lost_given_to(alive)


def beyond(placement: Placement, now: Placement, rank: int) -> Held:
    """Returns the experts that a rank holds now beside its own; layers without any are left out."""
    own, held = placement.held_by(rank), now.held_by(rank)
    extra = {layer: sorted(set(ids) - set(own[layer])) for layer, ids in held.items()}
    return {layer: ids for layer, ids in extra.items() if ids}


def renumbered(placement: Placement, members: Sequence[int]) -> dict[int, list[list[int]]]:
    """Returns layer -> expert -> ranks, each rank as its index among the members of an epoch."""
    place = {rank: index for index, rank in enumerate(members)}
    return {
        layer: [[place[rank] for rank in ranks] for ranks in experts]
        for layer, experts in placement.ranks_of.items()
    }
