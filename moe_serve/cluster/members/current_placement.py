"""The placement in force, and the ranks that stand in for lost expert ranks.

Ranks load the placement by its version, epochs begin with it, and steps name it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from experts.placement.problem.placement import Placement
from moe_serve.clock import REAL_CLOCK, Clock

Held = dict[int, list[int]]  # layer -> experts


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementVersion:
    """One placement. Numbers only grow; those of cancelled moves are skipped."""

    number: int
    placement: Placement
    since: float  # on the cluster's clock


class CurrentPlacement:
    """Holds the placement by which every rank serves.

    The engine thread switches it; any thread may read it. A rank that cannot follow a switch is
    lost.
    """

    def __init__(self, placement: Placement, clock: Clock = REAL_CLOCK) -> None:
        self._clock = clock
        self._version = PlacementVersion(number=0, placement=placement, since=clock())
        self._listeners: list[Callable[[Placement], None]] = []

    @property
    def version(self) -> PlacementVersion:
        return self._version

    def on_switch(self, hear: Callable[[Placement], None]) -> None:
        """Registers `hear`, which is called on the engine thread between two steps."""
        self._listeners.append(hear)

    def switch(self, number: int, placement: Placement) -> None:
        assert number > self._version.number, f"{number} after {self._version.number}"
        self._version = PlacementVersion(number=number, placement=placement, since=self._clock())
        for hear in self._listeners:
            hear(placement)


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
