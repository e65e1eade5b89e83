"""Reads and writes vLLM's `initial_mapping_path` of `--eplb-config`: one JSON object on one line.

    {"record_type": "eplb_initial_mapping", "version": 1, "num_redundant_experts": 1,
     "num_slots": 4, "initial_global_assignments": {"0": [0, 1, 2, 0], ...}}

Layers are counted among those with experts, from 0 without a gap.
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

NAME, RECORD, VERSION = "vllm", "eplb_initial_mapping", 1
ASSIGNMENTS = "initial_global_assignments"
_KEYS = ("record_type", "version", "num_redundant_experts", "num_slots", ASSIGNMENTS)


def parse(content: Any, facts: PlanFacts) -> EnginePlan:
    """Reads the plan. Raises PlacementError."""
    record = check_keys(content, _KEYS)
    if (record["record_type"], record["version"]) != (RECORD, VERSION):
        raise PlacementError(
            f"record_type must be {RECORD!r} and version {VERSION}, got {record['record_type']!r} "
            f"and {record['version']!r}."
        )
    assignments = record[ASSIGNMENTS]
    if not isinstance(assignments, dict) or not assignments:
        raise PlacementError(
            f"{ASSIGNMENTS} must be an object that maps layer numbers to lists of experts."
        )
    count = len(assignments)
    if set(assignments) != {str(layer) for layer in range(count)}:
        raise PlacementError(
            f"{ASSIGNMENTS} has {count} layers, which must be numbered 0 to {count - 1} among "
            f"those with experts, got {sorted(map(str, assignments))[:8]}."
        )
    slots = {
        layer: as_slots(assignments[str(row)], f"Layer {row}")
        for row, layer in enumerate(counted_layers(count, facts))
    }
    plan = plan_of_slots(slots, facts, NAME)
    num_slots = len(next(iter(slots.values())))
    stated = record["num_slots"], record["num_redundant_experts"]
    found = num_slots, num_slots - plan.placement.num_experts
    if stated != found:
        raise PlacementError(
            f"num_slots and num_redundant_experts are {stated[0]!r} and {stated[1]!r}, but its "
            f"layers have {found[0]} slots and {found[1]} redundant experts."
        )
    return plan


def render(placement: Placement, facts: PlanFacts) -> str:
    """Writes the plan. Raises PlacementError."""
    slots = slots_of_plan(placement, NAME)
    num_slots = len(next(iter(slots.values())))
    record = {
        "record_type": RECORD,
        "version": VERSION,
        "num_redundant_experts": num_slots - placement.num_experts,
        "num_slots": num_slots,
        ASSIGNMENTS: {str(row): slots[layer] for row, layer in enumerate(slots)},
    }
    return json.dumps(record) + "\n"
