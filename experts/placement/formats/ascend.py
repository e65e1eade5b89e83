"""Reads and writes vLLM-Ascend's `expert_map_path` (also MindIE's, and the format that vLLM-Ascend
records).

    {"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 2, "device_list":
      [{"device_id": 0, "device_expert": [0, 1]}, {"device_id": 1, "device_expert": [2, 0]}]}]}

Layers are counted among those with experts. No device holds an expert twice, because the engine
stores one place for each expert on a device.
"""

from __future__ import annotations

import json
from typing import Any

from experts.placement.formats.engine_plan import (
    EnginePlan,
    PlanFacts,
    as_slots,
    check_keys,
    counted_layers,
    plan_of_slots,
    slots_of_plan,
)
from experts.placement.placement_error import PlacementError
from experts.placement.problem.placement import Placement

NAME = "ascend"


def parse(content: Any, facts: PlanFacts) -> EnginePlan:
    """Reads the plan. Raises PlacementError."""
    top = check_keys(content, ["moe_layer_count", "layer_list"])
    entries = top["layer_list"]
    if not isinstance(entries, list) or not entries or len(entries) != top["moe_layer_count"]:
        found = len(entries) if isinstance(entries, list) else "no"
        raise PlacementError(
            f"moe_layer_count must be the number of layers in layer_list ({found}), got "
            f"{top['moe_layer_count']!r}."
        )
    layers = counted_layers(len(entries), facts)
    rows = [_layer(row, entry) for row, entry in enumerate(entries)]
    counts = {len(devices) for devices in rows}
    num_devices = facts.num_devices or len(rows[0])
    if counts != {num_devices}:
        raise PlacementError(
            f"The plan is for {sorted(counts)} devices, but there are {num_devices}."
        )
    known = PlanFacts(num_experts=facts.num_experts, num_devices=num_devices)
    slots = {
        layer: [expert for held in devices for expert in held]
        for layer, devices in zip(layers, rows, strict=True)
    }
    return plan_of_slots(slots, known, NAME)


def render(placement: Placement, facts: PlanFacts) -> str:
    """Writes the plan as vLLM-Ascend records it. Raises PlacementError."""
    layers = []
    for row, slots in enumerate(slots_of_plan(placement, NAME).values()):
        width = len(slots) // placement.num_ranks
        devices = [
            {"device_id": rank, "device_expert": slots[rank * width : (rank + 1) * width]}
            for rank in range(placement.num_ranks)
        ]
        layers.append({"layer_id": row, "device_count": len(devices), "device_list": devices})
    return json.dumps({"moe_layer_count": len(layers), "layer_list": layers}, indent=1) + "\n"


def _layer(row: int, entry: Any) -> list[list[int]]:
    """Returns the experts of each device: the same number on all, and no expert twice on one."""
    where = f"Layer {row} of layer_list"
    is_object = isinstance(entry, dict) and isinstance(entry.get("device_list"), list)
    if not is_object or entry.get("layer_id", row) != row:
        raise PlacementError(f"{where} must have the layer_id {row} and a device_list.")
    devices = entry["device_list"]
    if not devices or entry.get("device_count", len(devices)) != len(devices):
        raise PlacementError(
            f"{where}: device_count must be the number of devices in device_list ({len(devices)}), "
            f"got {entry.get('device_count')!r}."
        )
    rows = []
    for number, device in enumerate(devices):
        if not isinstance(device, dict) or device.get("device_id", number) != number:
            raise PlacementError(f"{where}: device {number} is missing, or has another device_id.")
        held = as_slots(device.get("device_expert"), f"{where}, device {number}")
        if len(set(held)) < len(held):
            twice = next(expert for expert in held if held.count(expert) > 1)
            raise PlacementError(
                f"{where}: device {number} holds expert {twice} twice, which the engine does not "
                "allow."
            )
        rows.append(held)
    widths = {len(held) for held in rows}
    if len(widths) > 1:
        raise PlacementError(
            f"{where}: one device has {min(widths)} experts and another {max(widths)}; the engine "
            "needs the same number on every device."
        )
    return rows
