"""The cells of a server as JSON, for the dashboard and the admin routes."""

from __future__ import annotations

from typing import Any

from experts.placement.problem.placement import Placement
from moe_serve.engine.request.stats import EngineStats
from moe_serve.engine.routes.cell_placements import AnyPlacement, CellPlacements


def cells_part(stats: EngineStats, *, has_commands: bool = False) -> list[dict[str, Any]]:
    """Returns one object for each cell; none with a single cell. With `has_commands` they have the
    commands that start ranks by hand.
    """
    return [
        {
            "name": cell.name,
            "state": cell.state,
            "role": cell.role,
            "ranks": cell.ranks,
            "running": cell.load.num_running,
            "waiting": cell.load.num_waiting,
            "kv_used": cell.load.used_share,
            "steps": cell.num_steps,
            "lost_ranks": cell.num_lost_ranks,
            "outage_s": round(cell.outage_s, 1),
            "is_draining": cell.is_draining,
            "draining_ranks": list(cell.draining_ranks),
            "note": cell.note,
            **({"commands": list(cell.commands)} if has_commands else {}),
        }
        for cell in stats.cells
    ]


def scaling_part(stats: EngineStats) -> dict[str, Any] | None:
    """Returns the state of autoscaling; None if the number of cells does not follow the load."""
    scaling = stats.scaling
    if scaling is None:
        return None
    return {
        "policy": scaling.policy,
        "wanted": dict(scaling.wanted),
        "decisions": dict(scaling.num_decisions),
        "last": scaling.last,
    }


class CellPlacementsPart:
    """Makes the part of the state about the placements of cells."""

    def __init__(self) -> None:
        self._replicas: dict[int, tuple[Placement, int]] = {}  # of the last placements, by cell

    def part(self, placement: AnyPlacement | None) -> list[dict[str, Any]]:
        """Returns one object for each cell; none with a single cell. The balance counts only the
        rows that the cell computed itself.
        """
        if not isinstance(placement, CellPlacements):
            return []
        parts = []
        for cell, control in placement.by_cell.items():
            status, last = control.status(), control.brief().last
            parts.append(
                {
                    "cell": f"cell-{cell}",
                    "version": status.version,
                    "balance": status.balance.achieved,
                    "num_replicas": self._num_replicas(cell, control.plan()),
                    "age_s": round(status.age_s, 1),
                    "state": status.state,
                    "last_move": None if last is None else f"{last.outcome}: {last.text}",
                }
            )
        return parts

    def _num_replicas(self, cell: int, placement: Placement) -> int:
        known = self._replicas.get(cell)
        if known is None or known[0] is not placement:
            holders = [ranks for experts in placement.ranks_of.values() for ranks in experts]
            known = self._replicas[cell] = placement, sum([len(ranks) - 1 for ranks in holders])
        return known[1]
