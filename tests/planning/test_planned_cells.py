"""A cell that does not fit into memory is refused before its ranks start."""

from __future__ import annotations

import pytest

from moe_serve.config.cells import CellsConfig
from moe_serve.config.sections import CacheConfig, EngineConfig
from moe_serve.errors import ConfigError
from moe_serve.planning.planned_cells import PlannedCells


class NotedCells:
    def __init__(self) -> None:
        self.added: list[tuple[str, int | None, bool]] = []

    def add_cell(self, shape: str, *, number: int | None = None, by_hand: bool = False) -> int:
        self.added.append((shape, number, by_hand))
        return 2

    def remove_cell(self, index: int) -> None: ...

    def drain(self, index: int, *, is_draining: bool) -> None: ...

    def drain_rank(self, name: str, *, is_draining: bool) -> None: ...


def test_only_a_cell_that_fits_is_started_here() -> None:
    cells, layout = NotedCells(), CellsConfig(layout="2x(1A1E)")
    huge = EngineConfig(cells=layout, cache=CacheConfig(num_pages=10**9))
    with pytest.raises(ConfigError, match="the model does not fit: .* 1000000000 KV pages"):
        PlannedCells(cells, huge).add_cell("1A1E decode")
    assert not cells.added
    PlannedCells(cells, huge).add_cell("1A1E decode", by_hand=True)
    small = EngineConfig(cells=layout, cache=CacheConfig(num_pages=512))
    assert PlannedCells(cells, small).add_cell("(1A1E decode)", number=2) == 2
    assert cells.added == [("1A1E decode", None, True), ("(1A1E decode)", 2, False)]
    with pytest.raises(ConfigError, match="it takes one cell such as"):
        PlannedCells(cells, small).add_cell("fast")
