"""Shows the progress of a run as a line in a terminal, and nothing elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from moe_serve.bench.client.client import Progress

_REFRESH_PER_S = 4
_BAR = 24


class LiveLine:
    """A progress line. Use `with`, and pass `start` to the run. A thread of rich redraws it four
    times a second."""

    def __init__(self, console: Console) -> None:
        self._progress: Progress | None = None
        self._planned: int | None = None
        self._since = 0.0
        self._live = Live(
            console=console,
            get_renderable=self._line,
            refresh_per_second=_REFRESH_PER_S,
            transient=True,
            auto_refresh=console.is_terminal,
        )

    def __enter__(self) -> LiveLine:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def start(self, progress: Progress, planned: int | None) -> None:
        self._progress, self._planned = progress, planned
        self._since = time.perf_counter()

    def _line(self) -> Text:
        progress = self._progress
        if progress is None:
            return Text("asking the server, warming up ...", style="dim")
        seconds = max(1e-9, time.perf_counter() - self._since)
        num_done = progress.num_ok + progress.num_failed
        line = Text()
        if self._planned:
            filled = round(_BAR * num_done / self._planned)
            line.append("█" * filled + "░" * (_BAR - filled), style="green")
            line.append(f" {num_done}/{self._planned}")
        else:
            line.append(f"{num_done} done")
        line.append(f"  {progress.num_in_flight} in flight")
        line.append(f"  {progress.num_ok / seconds:.1f} requests/s")  # as the report counts them
        line.append(f"  {progress.num_events / seconds:,.0f} events/s")
        line.append(f"  {seconds:.0f} s")
        if progress.num_failed:
            line.append(f"  {progress.num_failed} failed", style="red")
        return line
