"""A console whose tables of figures are never cut: not in a file or a pipe, where nobody sees a
width, nor on a narrow terminal, which wraps what is longer than its lines by itself."""

from __future__ import annotations

from rich.console import Console, ConsoleRenderable, RenderHook
from rich.table import Table

_COLUMNS = 180
_ANY_WIDTH = 10_000


def wide_console() -> Console:
    """For standard output."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _COLUMNS
    console.push_render_hook(_WholeFigures(console))
    return console


class _WholeFigures(RenderHook):
    """Columns as wide as what is in them, where a table has heads; grids of words are folded."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._unbound = console.options.update_width(_ANY_WIDTH)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        for table in renderables:
            if not (isinstance(table, Table) and table.show_header):
                continue
            for column in table.columns:
                cells = [column.header, *column.cells]
                measured = [self._console.measure(cell, options=self._unbound) for cell in cells]
                column.min_width = max(each.maximum for each in measured)
        return renderables
