"""Refuses cells that do not fit into the memory of this machine, before they start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_serve.config.cells import parse_cell
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.watch.cells_control import (
    ANYWHERE,
    CellPlace,
    CellsControl,
    NodeStatus,
)
from moe_serve.planning.plan_memory import plan_memory


class PlannedCells:
    """Implements CellsControl for cells whose ranks run here."""

    def __init__(self, cells: CellsControl, config: EngineConfig) -> None:
        self._cells, self._config = cells, config

    def add_cell(
        self, shape: str, *, number: int | None = None, place: CellPlace = ANYWHERE
    ) -> int:
        """See `CellsControl.add_cell`. Waits for a moment, as it reads the model's config."""
        if place == ANYWHERE:
            layout = f"1x({parse_cell(shape).ranks})"
            cells = replace(self._config.cells, layout=layout)
            plan_memory(replace(self._config, cells=cells)).check()
        return self._cells.add_cell(shape, number=number, place=place)

    def nodes(self) -> Sequence[NodeStatus]:
        """See `CellsControl.nodes`."""
        return self._cells.nodes()

    def remove_cell(self, index: int) -> None:
        """See `CellsControl.remove_cell`."""
        self._cells.remove_cell(index)

    def drain(self, index: int, *, is_draining: bool) -> None:
        """See `CellsControl.drain`."""
        self._cells.drain(index, is_draining=is_draining)

    def drain_rank(self, name: str, *, is_draining: bool) -> None:
        """See `CellsControl.drain_rank`."""
        self._cells.drain_rank(name, is_draining=is_draining)
