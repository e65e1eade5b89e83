"""The parts that all cells of a server share beside their requests: adapters, service tiers and the
view of their placements.

    part of a new cell      gets `adapters` and `policy`, before its ranks start
    connect                 when it serves
    disconnect              when it is gone
"""

from __future__ import annotations

from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.clock import REAL_CLOCK
from moe_serve.cluster.cells.cell import Cell
from moe_serve.cluster.members.cluster_adapters import CellAdapters, ClusterAdapters
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.routes.cell_placements import CellPlacements
from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.engine.service.service_policy import ServicePolicy


class JoinedParts:
    """One object of each kind for all cells; None if the configuration has no adapters, or no
    tiers.
    """

    def __init__(self, config: EngineConfig, adapters: ClusterAdapters | None) -> None:
        """Raises ConfigError."""
        self._config, self.adapters = config, adapters
        self.policy = ServicePolicy.of(config.scheduler, REAL_CLOCK)
        self.placements = CellPlacements()

    def open_adapters(self) -> AdapterRegistry | None:
        """Loads the configured adapters in all cells. Raises ConfigError."""
        return None if self.adapters is None else self.adapters.open(self._config.adapters)

    def connect(
        self, cell: Cell, adapters: CellAdapters | None, placement: PlacementControl | None
    ) -> None:
        """Connects a cell that is about to serve. `adapters` are those of its membership, and
        `placement` is its rebalancer.
        """
        assert placement is not None, f"{cell.name} has no engine yet"
        self.placements.add(cell.index, placement)
        if adapters is not None:
            cell.lacks = adapters.lacks

    def disconnect(self, cell: Cell) -> None:
        """Forgets the placement of a cell that is gone, after `Cell.retire`. Safe from any
        thread.
        """
        self.placements.remove(cell.index)

    def close(self) -> None:
        """Ends all loads of adapters."""
        if self.adapters is not None:
            self.adapters.close()
