"""Solvers by name, their progress on a terminal, and Ctrl-C, which ends with the best so far."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from experts.placement.problem import PlacementProblem
from experts.placement.solution import Progress, Solution, Solver


class Interrupts:
    """Counts Ctrl-C while it is open; the second is raised as ever."""

    def __init__(self) -> None:
        self.has_come = False
        self._former: Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)
            self._former = None

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        if self.has_come:
            raise KeyboardInterrupt
        self.has_come = True
        typer.echo("\nending with the best so far; Ctrl-C again does not wait for it", err=True)


def solve(
    solver: Solver, problem: PlacementProblem, seconds: float | None, interrupts: Interrupts
) -> Solution:
    """With the incumbent and the bound shown. Raises PlacementError."""
    with _bar(solver.name) as show:

        def report(progress: Progress) -> bool:
            show(progress)
            return not interrupts.has_come

        return solver.solve(problem, seconds=seconds, report=report)


@contextmanager
def _bar(name: str) -> Iterator[Callable[[Progress], None]]:
    """On a terminal; elsewhere nothing is shown."""
    console = Console(highlight=False, stderr=True)
    columns = (
        TextColumn(name), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)

        def show(progress: Progress) -> None:
            gap = progress.objective / progress.bound - 1.0
            words = f"objective {progress.objective:.4f}, bound {progress.bound:.4f}, gap {gap:.2%}"
            bar.update(task, description=words, completed=progress.done)

        yield show
