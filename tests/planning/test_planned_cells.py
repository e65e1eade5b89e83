"""A cell that does not fit into memory is refused before its ranks start."""

from __future__ import annotations

import pytest

from moe_serve.config.cells import CellsConfig
from moe_serve.config.sections import CacheConfig, EngineConfig
from moe_serve.engine.watch.cells_control import ANYWHERE, CellPlace, NodeStatus
from moe_serve.errors import ConfigError
from moe_serve.planning.planned_cells import PlannedCells


class NotedCells:
    def __init__(self) -> None:
        self.added: list[tuple[str, int | None, CellPlace]] = []

    def add_cell(
        self, shape: str, *, number: int | None = None, place: CellPlace = ANYWHERE
    ) -> int:
        self.added.append((shape, number, place))
        return 2

    def remove_cell(self, index: int) -> None: ...

    def drain(self, index: int, *, is_draining: bool) -> None: ...

    def drain_rank(self, name: str, *, is_draining: bool) -> None: ...

    def nodes(self) -> tuple[NodeStatus, ...]:
        return ()


def test_only_a_cell_that_fits_is_started_here() -> None:
    cells, layout = NotedCells(), CellsConfig(layout="2x(1A1E)")
    huge = EngineConfig(cells=layout, cache=CacheConfig(num_pages=10**9))
    with pytest.raises(ConfigError, match="the model does not fit: .* 1000000000 KV pages"):
        PlannedCells(cells, huge).add_cell("1A1E decode")
    assert not cells.added
    elsewhere = CellPlace(by_hand=True), CellPlace(node="b")
    for place in elsewhere:
        PlannedCells(cells, huge).add_cell("1A1E decode", place=place)
    small = EngineConfig(cells=layout, cache=CacheConfig(num_pages=512))
    assert PlannedCells(cells, small).add_cell("(1A1E decode)", number=2) == 2
    assert cells.added == [
        *(("1A1E decode", None, place) for place in elsewhere),
        ("(1A1E decode)", 2, ANYWHERE),
    ]
    with pytest.raises(ConfigError, match="it takes one cell such as"):
        PlannedCells(cells, small).add_cell("fast")
