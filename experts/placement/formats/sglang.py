"""Reads and writes SGLang's `--init-expert-location FILE.json`.

    {"physical_to_logical_map": [[0, 1, 2, 0], ...]}

There is a row for each decoder layer, dense ones too (their content is ignored). The server takes
no other key. It requires `--ep-num-redundant-experts` to equal slots minus experts, and a number of
slots that `--ep-size` divides.
"""

from __future__ import annotations

import json
from typing import Any

from experts.placement.formats.engine_plan import (
    EnginePlan,
    PlanFacts,
    as_slots,
    check_keys,
    plan_of_slots,
    slots_of_plan,
)
from experts.placement.placement_error import PlacementError
from experts.placement.problem.placement import Placement

NAME, KEY = "sglang", "physical_to_logical_map"


def parse(content: Any, facts: PlanFacts) -> EnginePlan:
    """Reads the plan. Raises PlacementError."""
    rows = check_keys(content, [KEY])[KEY]
    if not isinstance(rows, list) or not rows:
        raise PlacementError(f"{KEY} must be a list of layers.")
    num_layers = facts.num_layers
    if num_layers is not None and len(rows) != num_layers:
        raise PlacementError(
            f"{KEY} has {len(rows)} rows, but the model has {num_layers} layers: every "
            "layer needs a row, dense ones too."
        )
    layers = facts.layers if facts.layers is not None else tuple(range(len(rows)))
    if max(layers, default=0) >= len(rows):
        raise PlacementError(
            f"{KEY} has {len(rows)} rows, but layer {max(layers)} has experts: every layer "
            "needs a row, dense ones too."
        )
    all_slots = {layer: as_slots(row, f"Row {layer}") for layer, row in enumerate(rows)}
    widths = {len(row) for row in all_slots.values()}
    if len(widths) > 1:
        raise PlacementError(
            f"{KEY} has rows of {min(widths)} and of {max(widths)} slots; all rows must have the "
            "same number."
        )
    return plan_of_slots({layer: all_slots[layer] for layer in layers}, facts, NAME)


def render(placement: Placement, facts: PlanFacts) -> str:
    """Writes the plan, one row a line. Dense layers list the experts in order, starting again for
    replicas.

    Raises PlacementError if the number of the model's layers is unknown.
    """
    slots = slots_of_plan(placement, NAME)
    if facts.num_layers is None or facts.layers is None:
        raise PlacementError(
            "SGLang needs a row for every layer of the model, dense ones too: give the model, its "
            "number of layers, or its dense layers."
        )
    if set(slots) != set(facts.layers) or max(slots) >= facts.num_layers:
        raise PlacementError(
            f"The plan has {len(slots)} layers up to {max(slots)}, but the model has "
            f"{facts.num_layers}, {len(facts.layers)} of them with routed experts."
        )
    num_slots = len(next(iter(slots.values())))
    nothing = [slot % placement.num_experts for slot in range(num_slots)]
    rows = [json.dumps(slots.get(layer, nothing)) for layer in range(facts.num_layers)]
    return f'{{"{KEY}": [\n' + ",\n".join(rows) + "\n]}\n"
