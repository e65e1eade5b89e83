"""A console whose tables are not folded where nobody watches: in a file or a pipe."""

from __future__ import annotations

from rich.console import Console

_COLUMNS = 180


def wide_console() -> Console:
    """For standard output."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _COLUMNS
    return console
