"""Recognises the format of a placement file, and reads or writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experts.placement.formats import ascend, csv_table, sglang, trtllm, vllm
from experts.placement.formats.engine_plan import EnginePlan, PlanFacts, check_size
from experts.placement.placement_error import NotAPlanError, PlacementError, PlacementInputError
from experts.placement.plan_file import FORMAT, parse_json, parse_placement
from experts.placement.problem.devices import Devices
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem

OURS = "moe-serve"
WRITERS: Mapping[str, Callable[[Placement, PlanFacts], str]] = {
    sglang.NAME: sglang.render,
    vllm.NAME: vllm.render,
    trtllm.NAME: trtllm.render,
    ascend.NAME: ascend.render,
    csv_table.NAME: csv_table.render,
}


def parse_text(text: str, facts: PlanFacts) -> EnginePlan:
    """Reads JSON or CSV; `parse_content` reads YAML. Raises PlacementError or NotAPlanError."""
    if text.lstrip().startswith(csv_table.HEADER[0]):
        return _sized(csv_table.parse(text, facts))
    try:
        content = parse_json(text)
    except PlacementError:
        raise
    except (ValueError, RecursionError) as error:
        raise NotAPlanError(f"It is neither JSON nor a table of experts ({error}).") from None
    return parse_content(content, facts)


def parse_content(content: Any, facts: PlanFacts) -> EnginePlan:
    """Reads the content of a JSON file, a YAML file or a recording. Raises PlacementError or
    NotAPlanError."""
    return _sized(_parsed(content, facts))


def _sized(plan: EnginePlan) -> EnginePlan:
    placement = plan.placement
    check_size(len(placement.ranks_of), placement.num_experts, placement.num_ranks)
    return plan


def _parsed(content: Any, facts: PlanFacts) -> EnginePlan:
    if not isinstance(content, dict):
        raise NotAPlanError("A plan must be a JSON or YAML object.")
    if content.get("format") == FORMAT:
        return EnginePlan(format=OURS, placement=parse_placement(content))
    if sglang.KEY in content:
        return sglang.parse(content, facts)
    if "layer_list" in content:
        return ascend.parse(content, facts)
    if "record_type" in content:
        return vllm.parse(content, facts)
    if trtllm.ASSIGNMENTS in content:
        return trtllm.parse(content, facts)
    keys = ", ".join(map(repr, list(content)[:6]))
    raise NotAPlanError(f"Its keys are not those of any known plan: {keys or 'none'}.")


def render_plan(name: str, placement: Placement, facts: PlanFacts) -> str:
    """Writes the plan for the engine `name`. Raises PlacementError."""
    if name not in WRITERS:
        raise PlacementError(f"The format must be one of {', '.join(WRITERS)}, got {name!r}.")
    return WRITERS[name](placement, facts)


def check_export(name: str, problem: PlacementProblem, facts: PlanFacts) -> None:
    """Checks before planning that the format takes plans of this problem. Raises
    PlacementInputError, PlacementError."""
    stand_in = _filled(problem.devices, problem.loads.num_experts, problem.loads.layers)
    render_plan(name, stand_in, facts)
    if not problem.fill and name != csv_table.NAME:
        raise PlacementInputError(
            f"--no-fill may leave slots empty, but {name} needs all of them filled: leave "
            "--no-fill out."
        )


def _filled(devices: Devices, num_experts: int, layers: tuple[int, ...]) -> Placement:
    """Fills every slot with experts in turn."""
    ranks: list[list[int]] = [[] for _ in range(num_experts)]
    slot = 0
    for rank, device in enumerate(devices.devices):
        for _ in range(min(device.num_slots, num_experts)):
            ranks[slot % num_experts].append(rank)
            slot += 1
    ranks_of = dict.fromkeys(layers, tuple(map(tuple, ranks)))
    return Placement(num_ranks=len(devices), num_experts=num_experts, ranks_of=ranks_of)
