"""The placement problem: the loads, the devices and the limits.

S scenarios, L layers with routed experts, E experts of a layer, D devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement_error import PlacementError
from experts.placement.problem import feasible
from experts.placement.problem.devices import Devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.plan_limits import Grouping, Move, Pin, slots_by_layer

# tokens: rows a device computes (prefill, large batches). activated: the expected number of experts
# that a batch of `batch_size` tokens activates on a device, whose weights it then reads (decode).
Balance = Literal["tokens", "activated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """A placement problem, checked on construction: raises PlacementError, with the numbers, if no
    plan can exist.

    Every plan has, in each layer: a copy of every expert, no expert twice on a device, and at most
    the device's slots and memory. It respects every pin, the grouping and the budget of moves.
    `fill` requires that every slot is used, as other engines' formats do.
    """

    loads: ExpertLoads
    devices: Devices
    bytes_per_expert: int | None = None  # in one layer; required if memory is limited
    balance: Balance = "tokens"
    batch_size: int = 64  # tokens of a step, for `activated` and per-step expectations
    top_k: int | None = None  # experts of a token in a layer; `activated` needs it
    pins: tuple[Pin, ...] = ()
    grouping: Grouping | None = None
    move: Move | None = None
    fill: bool = True

    def __post_init__(self) -> None:
        feasible.check_numbers(
            self.loads, self.batch_size, self.top_k, needs_top_k=self.balance == "activated"
        )
        feasible.check_slots(self.loads, self.devices, fill=self.fill)
        feasible.check_size(self.loads, self.devices)
        feasible.check_memory(self.loads, self.devices, self.bytes_per_expert, fill=self.fill)
        slots_LD = self.slots_by_layer()
        feasible.check_pins(self.loads, slots_LD, self.pins)
        if self.grouping is not None:
            feasible.check_grouping(
                self.loads, self.devices, self.grouping, self.pins, fill=self.fill
            )
        if self.move is not None:
            feasible.check_move(self.loads, slots_LD, self.pins, self.move, fill=self.fill)

    @property
    def num_replicas(self) -> int:
        """Slots of one layer beyond one for each expert."""
        return self.devices.num_slots - self.loads.num_experts

    def slots_by_layer(self) -> NDArray[np.int64]:
        """Returns [L, D]: copies that a device may hold: its slots, or fewer if memory is short."""
        current = None if self.move is None else self.move.current
        return slots_by_layer(self.loads, self.devices, self.bytes_per_expert, current)


__all__ = ["Balance", "Grouping", "Move", "Pin", "PlacementError", "PlacementProblem"]
