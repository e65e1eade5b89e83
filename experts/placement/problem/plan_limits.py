"""Limits that a plan must respect in addition to slots: pins, groups of experts, a budget of
moves, and memory that all layers share.

L layers with routed experts, E experts of a layer, D devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.devices import Devices
from experts.placement.problem.loads import ExpertLoads
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


def slots_by_layer(
    loads: ExpertLoads,
    devices: Devices,
    bytes_per_expert: int | None,
    current: Placement | None = None,
) -> NDArray[np.int64]:
    """Returns slots [L, D]: each device's own number, or fewer if its memory is short. Memory is
    shared over the layers, and the copies of the current plan keep theirs.

    A remainder goes to the layers with the fewest slots so far, and among these to the one with the
    hottest expert. Worked example, two layers, one device of 4 slots and memory for 5 copies: 3
    slots in the layer with the hotter expert, 2 in the other.
    """
    num_layers = len(loads.layers)
    slots_D = np.array([device.num_slots for device in devices.devices])
    slots_LD = np.tile(np.minimum(slots_D, loads.num_experts), (num_layers, 1))
    if bytes_per_expert is None:
        return slots_LD
    heat_L = loads.shares_SLE().max(axis=(0, 2))
    for index, device in enumerate(devices.devices):
        copies = copies_in_memory(device.memory_bytes, bytes_per_expert)
        if copies is not None and copies < slots_LD[:, index].sum():
            others_L = slots_LD.sum(axis=1) - slots_LD[:, index]
            held_L = _held(current, loads, index)
            slots_LD[:, index] = _shared_out(copies, slots_LD[:, index], held_L, others_L, heat_L)
    return slots_LD


def _held(current: Placement | None, loads: ExpertLoads, device: int) -> NDArray[np.int64]:
    """Returns [L]: copies of the current plan on a device; 0 for layers it lacks, which another
    check reports."""
    if current is None or not 0 <= device < current.num_ranks:
        return np.zeros(len(loads.layers), dtype=np.int64)
    return np.array(
        [
            sum(device in ranks for ranks in current.ranks_of.get(layer, ()))
            for layer in loads.layers
        ]
    )


def _shared_out(
    copies: int,
    slots_L: NDArray[np.int64],
    held_L: NDArray[np.int64],
    others_L: NDArray[np.int64],
    heat_L: NDArray[np.float64],
) -> NDArray[np.int64]:
    given_L = np.minimum(held_L, slots_L)
    if given_L.sum() > copies:
        # the current plan does not fit, which another check reports
        given_L = np.zeros_like(given_L)
    for _ in range(copies - int(given_L.sum())):
        is_full_L = given_L >= slots_L
        given_L[np.lexsort((-heat_L, others_L + given_L, is_full_L))[0]] += 1
    return given_L


def copies_in_memory(memory_bytes: int | None, bytes_per_expert: int | None) -> int | None:
    """Copies that fit into the memory, over all layers; None if only slots limit them."""
    if memory_bytes is None or bytes_per_expert is None:
        return None
    return memory_bytes // bytes_per_expert
