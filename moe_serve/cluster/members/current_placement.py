"""The placement in force, by version: ranks load it, epochs begin with it, and steps name it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from experts.placement.problem.placement import Placement
from moe_serve.clock import REAL_CLOCK, Clock


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
