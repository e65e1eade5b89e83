"""Reads and writes a table with one row for each copy of an expert, as ExFlow writes its
placements.

    Expert,Node
    0,1
    1,0

Expert e of layer l has the number l * E + e, with layers counted among those with experts. ExFlow
itself has one copy of each; here an expert with replicas has several rows. Nodes are devices.
"""

from __future__ import annotations

import csv
import io

from experts.placement.formats.engine_plan import EnginePlan, PlanFacts, counted_layers
from experts.placement.placement_error import PlacementError
from experts.placement.problem.placement import Placement

NAME, HEADER = "csv", ("Expert", "Node")


def parse(text: str, facts: PlanFacts) -> EnginePlan:
    """Reads the plan. Devices may hold different numbers of experts. Raises PlacementError."""
    if facts.num_experts is None:
        raise PlacementError(
            "A table of experts and nodes does not state the number of experts in a layer: "
            "give loads (--trace or --load), or the model."
        )
    ranks: dict[int, list[int]] = {}
    for line, (expert, node) in enumerate(_rows(text), 2):
        holders = ranks.setdefault(expert, [])
        if node in holders:
            raise PlacementError(f"Line {line} repeats expert {expert} on node {node}.")
        holders.append(node)
    count, rest = divmod(len(ranks), facts.num_experts)
    if rest or not count or max(ranks) >= len(ranks):
        raise PlacementError(
            f"The table has {len(ranks)} experts with numbers up to "
            f"{max(ranks, default=0)}, which do not make whole layers of "
            f"{facts.num_experts} experts."
        )
    layers, of_layer = counted_layers(count, facts), facts.num_experts
    return EnginePlan(
        format=NAME,
        placement=Placement(
            num_ranks=facts.num_devices or 1 + max(map(max, ranks.values())),
            num_experts=of_layer,
            ranks_of={
                layer: tuple(tuple(ranks[row * of_layer + e]) for e in range(of_layer))
                for row, layer in enumerate(layers)
            },
        ),
    )


def render(placement: Placement, facts: PlanFacts) -> str:
    lines = [",".join(HEADER)]
    for row, layer in enumerate(sorted(placement.ranks_of)):
        for expert, ranks in enumerate(placement.ranks_of[layer]):
            lines += [f"{row * placement.num_experts + expert},{rank}" for rank in ranks]
    return "\n".join(lines) + "\n"


def _rows(text: str) -> list[tuple[int, int]]:
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise PlacementError(f"It is not valid CSV: {error}.") from None
    if not rows or tuple(cell.strip() for cell in rows[0]) != HEADER:
        raise PlacementError(f"The first line must be {','.join(HEADER)}.")
    found = []
    for line, row in enumerate(rows[1:], 2):
        if len(row) != 2 or not all(_is_number(cell.strip()) for cell in row):
            raise PlacementError(f"Line {line} must be two whole numbers, got {','.join(row)!r}.")
        found.append((int(row[0]), int(row[1])))
    return found


def _is_number(cell: str) -> bool:
    return cell.isascii() and cell.isdigit() and len(cell) < 10
