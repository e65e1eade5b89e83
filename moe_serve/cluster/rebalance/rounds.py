"""Splits a plan into rounds of as many layers, or copies of one layer, as fit into the free
slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from experts.placement.placement_error import PlacementError
from experts.placement.problem.placement import Placement, RanksOf
from moe_serve.cluster.members.current_placement import Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One step of a move: its changes, by rank."""

    placement: Placement  # the whole placement after the round
    ranks_of: Mapping[int, RanksOf]  # of the layers that change
    held: Sequence[Held]  # by rank, in these layers
    gained: Sequence[Held]  # the part of `held` that is new to the rank

    @property
    def num_copies(self) -> int:
        """Returns the copies that all ranks read for it."""
        return sum(map(num_copies, self.gained))

    @property
    def most_copies(self) -> int:
        """Returns the most copies that one rank reads for it."""
        return max(map(num_copies, self.gained))


@dataclass(frozen=True, slots=True)
class _Move:
    """One copy of an expert goes from one rank to another. None stands for no rank: the copy is
    new, or is only dropped.
    """

    expert: int
    source: int | None
    target: int | None


def rounds(before: Placement, after: Placement, room: int) -> list[Round]:
    """Returns the way from one placement to another; it is empty if nothing changes.

    No rank gains more than `room` copies in a round. A layer that gives a rank more takes several
    rounds, between which no rank holds more of it than before or after the whole move. Raises
    PlacementError if `room` is 0 and a copy is gained.

    Worked example, room for 2: layers 0 and 1 give rank 0 one copy each, layer 2 gives it three.
    The first round has layers 0 and 1, the second two copies of layer 2, the third the last one.
    """
    found: list[Round] = []
    layers, taken = dict[int, RanksOf](), [0] * before.num_ranks
    at = before
    for layer in changed_layers(before, after):
        last = before.ranks_of[layer]
        for ranks in _steps(layer, before, after, room):
            counts = [len(experts) for experts in gained_between(last, ranks, at.num_ranks)]
            last = ranks
            if layer in layers or any(t + c > room for t, c in zip(taken, counts, strict=True)):
                found.append(_round(at, layers))
                at, layers, taken = found[-1].placement, {}, [0] * before.num_ranks
            layers[layer] = ranks
            taken = [t + c for t, c in zip(taken, counts, strict=True)]
    return [*found, _round(at, layers)] if layers else []


def _steps(layer: int, before: Placement, after: Placement, room: int) -> list[RanksOf]:
    """Returns the states of a layer after each of its steps; a single one if all its copies fit."""
    old, new = before.ranks_of[layer], after.ranks_of[layer]
    most = max(map(len, gained_between(old, new, before.num_ranks)))
    if most <= room:
        return [new]
    if room < 1:
        raise PlacementError(
            f"A rank must receive {most} copies of layer {layer}, but ranks have no room "
            "for copies: cluster.rebalance_max_moves is 0."
        )
    left = _moves(old, new)
    held, limits = _counts(old, before.num_ranks), _counts(new, before.num_ranks)
    limits = list(map(max, held, limits))
    ranks = [set(of_expert) for of_expert in old]
    steps = list[RanksOf]()
    while left:
        gained = [0] * before.num_ranks
        while chain := _chain(left, held, limits, gained, room):
            for move in chain:
                left.remove(move)
                if move.source is not None:
                    held[move.source] -= 1
                    ranks[move.expert].discard(move.source)
                if move.target is not None:
                    held[move.target] += 1
                    gained[move.target] += 1
                    ranks[move.expert].add(move.target)
        steps.append(tuple(tuple(sorted(of_expert)) for of_expert in ranks))
    return [*steps[:-1], new]


def _moves(old: RanksOf, new: RanksOf) -> list[_Move]:
    """Returns the copies that change their rank. Copies that are only dropped come first, because
    they make room.
    """
    found = list[_Move]()
    for expert, (before, after) in enumerate(zip(old, new, strict=True)):
        sources = [rank for rank in before if rank not in after]
        targets = [rank for rank in after if rank not in before]
        found += [_Move(expert, *pair) for pair in zip_longest(sources, targets)]
    return sorted(found, key=lambda move: move.target is not None)


def _chain(
    left: Sequence[_Move],
    held: Sequence[int],
    limits: Sequence[int],
    gained: Sequence[int],
    room: int,
) -> list[_Move]:
    """Returns moves that together leave every rank within its limit; empty if this round has none.

    A chain ends at a rank with a free place, or at a rank that it has already left. In the second
    case only that circle is returned. From a full rank, more copies have yet to leave than have yet
    to arrive, so a new round always has a chain.
    """
    leaving: dict[int | None, list[_Move]] = {}
    for move in left:
        if move.target is None:
            return [move]
        if gained[move.target] < room:
            leaving.setdefault(move.source, []).append(move)
    for first in (move for moves in leaving.values() for move in moves):
        chain, seen = [first], {first.source: 0}
        while (rank := chain[-1].target) is not None and held[rank] >= limits[rank]:
            if rank in seen:
                return chain[seen[rank] :]
            if rank not in leaving:
                break
            seen[rank] = len(chain)
            chain.append(leaving[rank][0])
        else:
            return chain
    return []


def _counts(ranks_of: RanksOf, num_ranks: int) -> list[int]:
    """Returns how many copies of a layer each rank holds."""
    counts = [0] * num_ranks
    for ranks in ranks_of:
        for rank in ranks:
            counts[rank] += 1
    return counts


def changed_layers(before: Placement, after: Placement) -> list[int]:
    """Returns the layers in which a copy is added or dropped. A different order of an expert's
    ranks is no change.
    """
    return [
        layer
        for layer, experts in sorted(before.ranks_of.items())
        if [set(ranks) for ranks in experts] != [set(ranks) for ranks in after.ranks_of[layer]]
    ]


def gained_between(before: RanksOf, after: RanksOf, num_ranks: int) -> list[list[int]]:
    """Returns, by rank, the experts of a layer that it holds afterwards and not before."""
    of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert, (old, new) in enumerate(zip(before, after, strict=True)):
        for rank in new:
            if rank not in old:
                of_rank[rank].append(expert)
    return of_rank


def num_copies(held: Held) -> int:
    return sum(map(len, held.values()))


def _round(at: Placement, changes: Mapping[int, RanksOf]) -> Round:
    held: list[Held] = [{layer: [] for layer in changes} for _ in range(at.num_ranks)]
    gained: list[Held] = [{} for _ in range(at.num_ranks)]
    for layer, experts in changes.items():
        for expert, ranks in enumerate(experts):
            for rank in ranks:
                held[rank][layer].append(expert)
        for rank, ids in enumerate(gained_between(at.ranks_of[layer], experts, at.num_ranks)):
            if ids:
                gained[rank][layer] = ids
    placement = replace(at, ranks_of={**at.ranks_of, **changes})
    return Round(placement=placement, ranks_of=changes, held=held, gained=gained)
