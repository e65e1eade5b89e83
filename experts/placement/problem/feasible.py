"""Checks whether any plan can exist, before a solver starts. Each error is one sentence with the
numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement_error import PlacementError
from experts.placement.problem.devices import Devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.plan_limits import Grouping, Move, Pin, copies_in_memory

_MOST_PLACES = 2**26  # limit on experts x devices over all layers: a table of them takes 512 MiB
_MOST_PACKED = 2**35  # limit on the steps of a first packing: about two minutes


def check_size(loads: ExpertLoads, devices: Devices) -> None:
    """Refuses problems that take too much time or memory; their layers can be planned
    separately."""
    num_scenarios, num_layers, num_experts = loads.counts_SLE.shape
    of_layer = num_experts * len(devices)
    packed = num_scenarios * len(devices) * min(devices.num_slots, of_layer)
    most_layers = min(_MOST_PLACES // of_layer, _MOST_PACKED // packed)
    if num_layers > most_layers:
        less = f"at most {most_layers} layers at a time" if most_layers else "for fewer devices"
        raise PlacementError(
            f"{num_layers} layers of {num_experts} experts with {num_scenarios} load tables on "
            f"{len(devices)} devices with {devices.num_slots} slots are too many to plan at once: "
            f"plan {less} (the layers' plans are independent)."
        )


def check_numbers(
    loads: ExpertLoads, batch_size: int, top_k: int | None, *, needs_top_k: bool
) -> None:
    """Checks the batch size and top-k."""
    if batch_size < 1:
        raise PlacementError(f"batch_size must be 1 or more, got {batch_size}.")
    if top_k is not None and not 1 <= top_k <= loads.num_experts:
        raise PlacementError(
            f"top_k must be 1 to {loads.num_experts}, the number of experts, got {top_k}."
        )
    if needs_top_k and top_k is None:
        raise PlacementError(
            "Balancing activated experts needs top_k, the number of experts that a token chooses: "
            "give --top-k."
        )


def check_slots(loads: ExpertLoads, devices: Devices, *, fill: bool) -> None:
    """Checks that every expert has a slot, and that with `fill` no device has more slots than there
    are experts."""
    num_experts, num_slots = loads.num_experts, devices.num_slots
    if num_slots < num_experts:
        raise PlacementError(
            f"{num_slots} slots on {len(devices)} devices cannot hold {num_experts} experts: "
            f"{num_experts - num_slots} more are needed."
        )
    largest = max(range(len(devices)), key=lambda index: devices.devices[index].num_slots)
    if fill and devices.devices[largest].num_slots > num_experts:
        raise PlacementError(
            f"Device {largest} has {devices.devices[largest].num_slots} slots, but there "
            f"are only {num_experts} experts, and a device may hold an expert only once: "
            f"allow empty slots (--no-fill), or give it {num_experts} slots."
        )


def check_memory(
    loads: ExpertLoads, devices: Devices, bytes_per_expert: int | None, *, fill: bool
) -> None:
    """Checks that the copies of all layers fit into the devices whose memory is limited."""
    limited = [i for i, device in enumerate(devices.devices) if device.memory_bytes is not None]
    if bytes_per_expert is None:
        if limited:
            raise PlacementError(
                f"Device {limited[0]} is limited to {devices.devices[limited[0]].memory_bytes} "
                "bytes of memory, which needs bytes_per_expert: give --model or "
                "--bytes-per-expert."
            )
        return
    if bytes_per_expert < 1:
        raise PlacementError(f"bytes_per_expert must be 1 or more, got {bytes_per_expert}.")
    num_layers, total = len(loads.layers), 0
    for index, device in enumerate(devices.devices):
        wanted = min(device.num_slots, loads.num_experts) * num_layers
        copies = copies_in_memory(device.memory_bytes, bytes_per_expert)
        if fill and copies is not None and copies < wanted:
            raise PlacementError(
                f"Device {index} needs {wanted * bytes_per_expert} bytes for "
                f"{device.num_slots} slots in {num_layers} layers of {bytes_per_expert} "
                f"bytes each, but has {device.memory_bytes}: give it "
                f"{copies // num_layers} slots, or allow empty slots (--no-fill)."
            )
        total += wanted if copies is None else min(copies, wanted)
    needed = loads.num_experts * num_layers
    if total < needed:
        raise PlacementError(
            f"The devices' memory holds {total} copies of {bytes_per_expert} bytes, but "
            f"{loads.num_experts} experts in {num_layers} layers need {needed}: give more memory "
            "or devices."
        )


def check_pins(loads: ExpertLoads, slots_LD: NDArray[np.int64], pins: Sequence[Pin]) -> None:
    """Checks that pins name existing layers, experts and devices, and leave room for the other
    experts."""
    num_devices = slots_LD.shape[1]
    for pin in pins:
        if not 0 <= pin.device < num_devices:
            raise PlacementError(f"Pin of {pin}: devices are 0 to {num_devices - 1}.")
        if not 0 <= pin.expert < loads.num_experts:
            raise PlacementError(f"Pin of {pin}: experts are 0 to {loads.num_experts - 1}.")
        if pin.layer is not None and pin.layer not in loads.layers:
            raise PlacementError(
                f"Pin of {pin}: the layer must be one of the {len(loads.layers)} layers of "
                f"the loads, {loads.layers[0]} to {loads.layers[-1]}."
            )
    for row, layer in enumerate(loads.layers):
        pairs = pins_of_layer(pins, layer)
        for device, count in Counter(device for _, device in pairs).items():
            if count > slots_LD[row, device]:
                raise PlacementError(
                    f"Layer {layer} pins {count} experts to device {device}, which has "
                    f"{slots_LD[row, device]} slots in that layer: remove pins or add slots."
                )
        copies = len(pairs) + loads.num_experts - len({expert for expert, _ in pairs})
        if copies > slots_LD[row].sum():
            raise PlacementError(
                f"Layer {layer} has {slots_LD[row].sum()} slots but needs {copies}: {len(pairs)} "
                "pinned copies and one of each other expert."
            )


def pins_of_layer(pins: Sequence[Pin], layer: int) -> list[tuple[int, int]]:
    """Returns the pins of a layer as (expert, device) pairs, each once."""
    return sorted({(pin.expert, pin.device) for pin in pins if pin.layer in (None, layer)})


def check_grouping(
    loads: ExpertLoads, devices: Devices, grouping: Grouping, pins: Sequence[Pin], *, fill: bool
) -> None:
    """Checks that groups divide the experts, and that the nodes have slots for all groups."""
    num_groups, most = grouping.num_groups, grouping.max_nodes_per_group
    if num_groups < 1 or loads.num_experts % num_groups:
        raise PlacementError(
            f"num_groups (--groups) must divide the {loads.num_experts} experts of a layer, "
            f"got {num_groups}."
        )
    if most < 1:
        raise PlacementError(
            f"max_nodes_per_group (--max-nodes-per-group) must be 1 or more, got {most}."
        )
    group_size = loads.num_experts // num_groups
    slots_of = [0] * devices.num_nodes
    widest_of = [0] * devices.num_nodes
    for device in devices.devices:
        slots_of[device.node] += device.num_slots
        widest_of[device.node] = max(widest_of[device.node], device.num_slots)
    room = sum(slots // group_size for slots in slots_of)
    if most == 1 and room < num_groups:
        raise PlacementError(
            f"Nodes of {slots_of} slots hold {room} whole groups of {group_size} experts, but "
            f"there are {num_groups} groups: add slots, or allow more nodes for each group."
        )
    places = num_groups * min(most, devices.num_nodes)
    wanted = sum(-(-widest // group_size) for widest in widest_of)
    if fill and wanted > places:
        raise PlacementError(
            f"To fill nodes whose largest devices have {widest_of} slots, {wanted} groups "
            f"of {group_size} experts are needed, but {num_groups} groups on {most} nodes "
            f"each give {places}: allow empty slots (--no-fill), or more nodes for each "
            "group."
        )
    _check_pinned_groups(loads, devices, grouping, pins)


def _check_pinned_groups(
    loads: ExpertLoads, devices: Devices, grouping: Grouping, pins: Sequence[Pin]
) -> None:
    group_size = loads.num_experts // grouping.num_groups
    for layer in loads.layers if pins else ():
        nodes_of: dict[int, set[int]] = {}
        for expert, device in pins_of_layer(pins, layer):
            nodes_of.setdefault(expert // group_size, set()).add(devices.devices[device].node)
        for group, nodes in nodes_of.items():
            if len(nodes) > grouping.max_nodes_per_group:
                raise PlacementError(
                    f"Layer {layer} pins experts of group {group} to nodes {sorted(nodes)}, but "
                    f"max_nodes_per_group is {grouping.max_nodes_per_group}."
                )


def check_move(
    loads: ExpertLoads,
    slots_LD: NDArray[np.int64],
    pins: Sequence[Pin],
    move: Move,
    *,
    fill: bool,
) -> None:
    """Checks that the current plan fits the model and the devices, and that the budget of moves
    suffices.

    The budget must cover the copies that any plan needs: pins that the current plan lacks, and
    slots to fill.
    """
    move.current.check_fits(loads.layers, loads.num_experts, slots_LD.shape[1])
    budget = move.max_copies_per_layer
    if budget is not None and budget < 0:
        raise PlacementError(f"max_copies_per_layer (--max-moves) must be 0 or more, got {budget}.")
    for row, layer in enumerate(loads.layers):
        held = [(e, d) for e, ranks in enumerate(move.current.ranks_of[layer]) for d in ranks]
        if any(not ranks for ranks in move.current.ranks_of[layer]):
            raise PlacementError(
                f"The current plan has an expert on no device in layer {layer}; use a plan that "
                "holds every expert."
            )
        counts_D = np.bincount([device for _, device in held], minlength=slots_LD.shape[1])
        over = np.flatnonzero(counts_D > slots_LD[row])
        if len(over):
            raise PlacementError(
                f"The current plan has {counts_D[over[0]]} experts on device {over[0]} in layer "
                f"{layer}, which has {slots_LD[row, over[0]]} slots there."
            )
        if budget is None:
            continue
        missing = set(pins_of_layer(pins, layer)) - set(held)
        pinned_D = np.bincount([device for _, device in missing], minlength=slots_LD.shape[1])
        empty_D = slots_LD[row] - counts_D if fill else np.zeros_like(counts_D)
        needed = int(np.maximum(pinned_D, empty_D).sum())
        if needed > budget:
            raise PlacementError(
                f"Layer {layer} must get {needed} copies ({len(missing)} pinned, "
                f"{int(empty_D.sum())} in slots to fill), but max_copies_per_layer (--max-moves) "
                f"is {budget}."
            )
