"""The placement in force, by its version: ranks load by it, epochs begin with it, steps name it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from experts.placement.problem.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementVersion:
    """One placement. Numbers grow; those of moves that were called off are left out."""

    number: int
    placement: Placement
    since: float  # time.monotonic()


class CurrentPlacement:
    """Switched by the engine thread, read by any. Every rank serves by it, or is lost."""

    def __init__(self, placement: Placement) -> None:
        self._version = PlacementVersion(number=0, placement=placement, since=time.monotonic())
        self._listeners: list[Callable[[Placement], None]] = []

    @property
    def version(self) -> PlacementVersion:
        return self._version

    def on_switch(self, hear: Callable[[Placement], None]) -> None:
        """`hear` is called on the engine thread, between two steps."""
        self._listeners.append(hear)

    def switch(self, number: int, placement: Placement) -> None:
        assert number > self._version.number, f"{number} after {self._version.number}"
        self._version = PlacementVersion(number=number, placement=placement, since=time.monotonic())
        for hear in self._listeners:
            hear(placement)
