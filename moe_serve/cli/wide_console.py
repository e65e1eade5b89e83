"""A console that never cuts tables of figures.

Files and pipes have no width, and a narrow terminal wraps longer lines by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.segment import Segment
from rich.table import Table

from moe_serve.errors import printable

_COLUMNS = 180
_ANY_WIDTH = 10_000


def wide_console() -> Console:
    """Returns a console for the standard output."""
    console = _PlainConsole(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _COLUMNS
    console.push_render_hook(_WholeFigures(console))
    return console


class _PlainConsole(Console):
    """Escapes control characters in text from files and servers."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_plain = segment.control or segment.text.isprintable()
            yield segment if is_plain else segment._replace(text=printable(segment.text))


class _WholeFigures(RenderHook):
    """Makes columns of tables with headers as wide as their content; other grids are folded."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._unbound = console.options.update_width(_ANY_WIDTH)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        for table in renderables:
            if not (isinstance(table, Table) and table.show_header):
                continue
            for column in table.columns:
                cells = [_as_shown(cell) for cell in (column.header, *column.cells)]
                measured = [self._console.measure(cell, options=self._unbound) for cell in cells]
                column.min_width = max(each.maximum for each in measured)
        return renderables


def _as_shown(cell: RenderableType) -> RenderableType:
    return printable(cell) if isinstance(cell, str) else cell
