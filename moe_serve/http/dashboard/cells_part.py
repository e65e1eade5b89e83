"""The cells of a server as JSON, for the dashboard and the admin routes."""

from __future__ import annotations

from typing import Any

from moe_serve.engine.request.stats import EngineStats


def cells_part(stats: EngineStats) -> list[dict[str, Any]]:
    """Returns one object for each cell; none with a single cell."""
    return [
        {
            "name": cell.name,
            "role": cell.role,
            "ranks": cell.ranks,
            "running": cell.load.num_running,
            "waiting": cell.load.num_waiting,
            "kv_used": cell.load.used_share,
            "steps": cell.num_steps,
            "lost_ranks": cell.num_lost_ranks,
            "outage_s": round(cell.outage_s, 1),
            "is_draining": cell.is_draining,
        }
        for cell in stats.cells
    ]
