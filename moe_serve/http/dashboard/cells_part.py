"""The cells of a server as JSON, for the dashboard and the admin routes."""

from __future__ import annotations

from typing import Any

from moe_serve.engine.request.stats import EngineStats


def cells_part(stats: EngineStats, *, has_commands: bool = False) -> list[dict[str, Any]]:
    """Returns one object for each cell; none with a single cell. `has_commands`: with the commands
    that start ranks by hand."""
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
