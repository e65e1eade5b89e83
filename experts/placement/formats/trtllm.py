"""Reads and writes TensorRT-LLM's `moe_config.load_balancer: FILE.yaml`.

    num_slots: 4
    initial_global_assignments:
      3: [0, 1, 2, 0]
    layer_updates_per_iter: 0

Layers have the model's numbers. With `layer_updates_per_iter` 0 the engine keeps the plan as it is.
The caller parses the YAML.
"""

from __future__ import annotations

from typing import Any

from experts.placement.formats.engine_plan import (
    EnginePlan,
    PlanFacts,
    as_slots,
    check_keys,
    is_index,
    plan_of_slots,
    slots_of_plan,
)
from experts.placement.placement_error import PlacementError
from experts.placement.problem.placement import Placement

NAME = "trtllm"
ASSIGNMENTS = "initial_global_assignments"


def parse(content: Any, facts: PlanFacts) -> EnginePlan:
    """Reads the plan. Raises PlacementError."""
    config = check_keys(content, ["num_slots", ASSIGNMENTS], ["layer_updates_per_iter"])
    if not is_index(config.get("layer_updates_per_iter", 0)):
        raise PlacementError(
            "layer_updates_per_iter must be a whole number, 0 or more, got "
            f"{config['layer_updates_per_iter']!r}."
        )
    assignments = config[ASSIGNMENTS]
    if not isinstance(assignments, dict) or not assignments:
        raise PlacementError(f"{ASSIGNMENTS} must map layer numbers to lists of experts.")
    strangers = [layer for layer in assignments if not is_index(layer)]
    if strangers:
        raise PlacementError(
            f"The keys of {ASSIGNMENTS} must be layer numbers, got {strangers[0]!r}."
        )
    slots = {layer: as_slots(assignments[layer], f"Layer {layer}") for layer in sorted(assignments)}
    widths = {len(experts) for experts in slots.values()}
    if not is_index(config["num_slots"]) or widths != {config["num_slots"]}:
        raise PlacementError(
            f"num_slots is {str(config['num_slots'])[:20]}, but its layers have {sorted(widths)} "
            "slots."
        )
    if facts.layers is not None and set(slots) != set(facts.layers):
        missing, more = set(facts.layers) - slots.keys(), slots.keys() - set(facts.layers)
        raise PlacementError(
            f"Layers are missing ({sorted(missing)[:8]}), or have no routed experts "
            f"({sorted(more)[:8]}): use the model's layer numbers."
        )
    return plan_of_slots(slots, facts, NAME)


def render(placement: Placement, facts: PlanFacts) -> str:
    """Writes the plan, one layer a line. Raises PlacementError if the model's layer numbers are
    unknown."""
    if facts.layers is None:
        raise PlacementError(
            "TensorRT-LLM uses the model's layer numbers, but these loads count only the layers "
            "with experts: give the model, its number of layers, or its dense layers."
        )
    slots = slots_of_plan(placement, NAME)
    rows = "".join(f"  {layer}: {experts}\n" for layer, experts in slots.items())
    num_slots = len(next(iter(slots.values())))
    return f"num_slots: {num_slots}\n{ASSIGNMENTS}:\n{rows}layer_updates_per_iter: 0\n"
