"""Runs solvers: shows their progress, and Ctrl-C ends them with the best plan so far."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Progress, Solution, Solver

_Tell = Callable[[str, float], None]  # words, and the part that is done
_FIRST_LINE_S, _NEXT_LINE_S = 5.0, 10.0


class Interrupts:
    """Counts Ctrl-C while it is open; the second one raises KeyboardInterrupt as usual."""

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
        typer.echo(
            "\nending with the best plan so far; press Ctrl-C again to stop at once", err=True
        )


def solve(
    interrupts: Interrupts, solver: Solver, problem: PlacementProblem, seconds: float | None
) -> Solution:
    """Solves the problem and shows the best plan and its bound. Raises PlacementError."""
    with _progress(solver.name) as show:

        def report(progress: Progress) -> bool:
            show(progress)
            return not interrupts.has_come

        return solver.solve(problem, seconds=seconds, report=report)


@contextmanager
def _progress(name: str) -> Iterator[Callable[[Progress], None]]:
    """Shows a bar on a terminal, and elsewhere a line every few seconds. Both show the time while a
    solver reports nothing yet."""
    console = Console(highlight=False, stderr=True)
    with _bar(name, console) if console.is_terminal else _lines(name) as tell:
        yield lambda progress: tell(_words(progress), progress.done)


def _words(progress: Progress) -> str:
    gap = progress.objective / progress.bound - 1.0
    return f"objective {progress.objective:.4f}, bound {progress.bound:.4f}, gap {gap:.2%}"


@contextmanager
def _bar(name: str, console: Console) -> Iterator[_Tell]:
    columns = (
        TextColumn(name), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("first plan", total=1.0)
        yield lambda words, done: bar.update(task, description=words, completed=done)


@contextmanager
def _lines(name: str) -> Iterator[_Tell]:
    ended, began, last = threading.Event(), time.monotonic(), ["first plan"]

    def tell() -> None:
        wait = _FIRST_LINE_S
        while not ended.wait(wait):
            wait = _NEXT_LINE_S
            typer.echo(f"{name}: {time.monotonic() - began:.0f} s, {last[0]}", err=True)

    teller = threading.Thread(target=tell, name="place-progress", daemon=True)
    teller.start()
    try:
        yield lambda words, done: last.__setitem__(0, f"{done:.0%} done, {words}")
    finally:
        ended.set()
        teller.join()
