"""Shows on a terminal how much of a model has been downloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextlib.contextmanager
def download_bar(console: Console, name: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yields a callback (bytes received, bytes in all) that draws a bar; None without a
    terminal."""
    if not console.is_terminal or console.quiet:
        yield None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"downloading {name}", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
