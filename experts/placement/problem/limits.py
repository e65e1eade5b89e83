"""Limits that a plan must respect in addition to slots: pins, groups of experts, a budget of
moves."""

from __future__ import annotations

from dataclasses import dataclass

from experts.placement.problem.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Requires a copy of an expert on a device, in one layer (the model's number) or in all."""

    expert: int
    device: int
    layer: int | None = None

    def __str__(self) -> str:
        where = "every layer" if self.layer is None else f"layer {self.layer}"
        return f"expert {self.expert} on device {self.device} in {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Divides the experts into equal consecutive groups, like routers that choose groups first, and
    limits the nodes that hold a group's copies."""

    num_groups: int
    max_nodes_per_group: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The current plan, and the number of copies per layer that a new plan may put on devices that
    lack them."""

    current: Placement
    max_copies_per_layer: int | None = None  # None means no limit; moves are still counted
