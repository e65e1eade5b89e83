"""TensorRT-LLM's `moe_config.load_balancer: FILE.yaml`.

    num_slots: 4
    initial_global_assignments:
      3: [0, 1, 2, 0]
    layer_updates_per_iter: 0

Layers have the model's numbers. `layer_updates_per_iter` 0 keeps the plan as it is. YAML is parsed
by who reads the file.
"""

from __future__ import annotations

from typing import Any

from experts.placement.errors import PlacementError
from experts.placement.formats.engine_plan import (
    EnginePlan,
    PlanFacts,
    as_slots,
    check_keys,
    is_index,
    plan_of_slots,
    slots_of_plan,
)
from experts.placement.problem.plan import Placement

NAME = "trtllm"
ASSIGNMENTS = "initial_global_assignments"


def parse(content: Any, facts: PlanFacts) -> EnginePlan:
    """Raises PlacementError."""
    config = check_keys(content, ["num_slots", ASSIGNMENTS], ["layer_updates_per_iter"])
    if not is_index(config.get("layer_updates_per_iter", 0)):
        raise PlacementError(
            f"layer_updates_per_iter is {config['layer_updates_per_iter']!r}, not a count."
        )
    assignments = config[ASSIGNMENTS]
    if not isinstance(assignments, dict) or not assignments:
        raise PlacementError(f"{ASSIGNMENTS} is not a mapping of layers.")
    strangers = [layer for layer in assignments if not is_index(layer)]
    if strangers:
        raise PlacementError(f"{strangers[0]!r} is not the number of a layer.")
    slots = {layer: as_slots(assignments[layer], f"Layer {layer}") for layer in sorted(assignments)}
    widths = {len(experts) for experts in slots.values()}
    if not is_index(config["num_slots"]) or widths != {config["num_slots"]}:
        raise PlacementError(
            f"num_slots is {str(config['num_slots'])[:20]}, and its layers have "
            f"{sorted(widths)} slots."
        )
    if facts.layers is not None and set(slots) != set(facts.layers):
        missing, more = set(facts.layers) - slots.keys(), slots.keys() - set(facts.layers)
        raise PlacementError(
            f"Layers are missing ({sorted(missing)[:8]}), or have no routed experts "
            f"({sorted(more)[:8]}): they have the model's numbers."
        )
    return plan_of_slots(slots, facts, NAME)


def render(placement: Placement, facts: PlanFacts) -> str:
    """One layer a line. Raises PlacementError where the model's numbers of layers are not known."""
    if facts.layers is None:
        raise PlacementError(
            "TensorRT-LLM counts layers as the model does, and these loads count those with "
            "experts: name the model, its number of layers, or its dense layers."
        )
    slots = slots_of_plan(placement, NAME)
    rows = "".join(f"  {layer}: {experts}\n" for layer, experts in slots.items())
    num_slots = len(next(iter(slots.values())))
    return f"num_slots: {num_slots}\n{ASSIGNMENTS}:\n{rows}layer_updates_per_iter: 0\n"
