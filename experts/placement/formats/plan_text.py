"""Recognises the format of a placement file, and reads or writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experts.placement.errors import NotAPlanError, PlacementError
from experts.placement.formats import ascend, csv_table, sglang, trtllm, vllm
from experts.placement.formats.engine_plan import EnginePlan, PlanFacts, check_size
from experts.placement.plan_file import FORMAT, parse_json, parse_placement
from experts.placement.problem.placement import Placement

OURS = "moe-serve"
WRITERS: Mapping[str, Callable[[Placement, PlanFacts], str]] = {
    sglang.NAME: sglang.render,
    vllm.NAME: vllm.render,
    trtllm.NAME: trtllm.render,
    ascend.NAME: ascend.render,
    csv_table.NAME: csv_table.render,
}


def parse_text(text: str, facts: PlanFacts) -> EnginePlan:
    """Read JSON or CSV; `parse_content` reads YAML. Raises PlacementError or NotAPlanError."""
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
    """Read the content of a JSON file, a YAML file or a recording. Raises PlacementError or
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
    raise NotAPlanError(f"It has the keys of no known plan ({keys or 'none'}).")


def render_plan(name: str, placement: Placement, facts: PlanFacts) -> str:
    """Write the plan for the engine `name`. Raises PlacementError."""
    if name not in WRITERS:
        raise PlacementError(f"The format must be one of {', '.join(WRITERS)}, got {name!r}.")
    return WRITERS[name](placement, facts)
