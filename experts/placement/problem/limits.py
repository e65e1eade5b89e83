"""What a plan must keep beside slots: pins, groups of experts, a budget of moves."""

from __future__ import annotations

from dataclasses import dataclass

from experts.placement.problem.plan import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """An expert that must have a copy on a device, in one layer (the model's number) or in all."""

    expert: int
    device: int
    layer: int | None = None

    def __str__(self) -> str:
        where = "every layer" if self.layer is None else f"layer {self.layer}"
        return f"expert {self.expert} on device {self.device} in {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Experts in equal runs, as routers that choose groups first; a group's copies on few nodes."""

    num_groups: int
    max_nodes_per_group: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The plan in use, and how many copies a layer may get that were not on the device before."""

    current: Placement
    max_copies_per_layer: int | None = None  # None: no limit, but moves are counted
