"""Makes solvers by name and runs them.

Progress is shown on a terminal, and Ctrl-C ends a solver with the best plan so far.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Progress, Solution, Solver
from experts.placement.solvers.references.eplb_solver import Eplb
from experts.placement.solvers.references.plain import Linear, RoundRobin
from experts.placement.solvers.search.solver import Search
from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    from experts.placement.sources import Posed


REFERENCES = ("linear", "round-robin", "eplb", "eplb-hierarchical")  # look at slots alone


def make_solver(name: str, posed: Posed, *, thorough: bool = False) -> Solver:
    """Returns the solver; with `thorough` the search uses all the time it is given."""
    if name == "search":
        return Search(thorough=thorough)
    if name == "ilp":
        from experts.placement.solvers.ilp.solver import IlpSolver

        return IlpSolver(Search())
    if name == "linear":
        return Linear()
    if name == "round-robin":
        return RoundRobin()
    return Eplb(groups_of(posed), hierarchical=name == "eplb-hierarchical")


def check_limits(name: str, posed: Posed) -> None:
    """Raises ConfigError for a limit that a reference solver would ignore: references look at slots
    alone."""
    if name not in REFERENCES:
        return
    problem = posed.problem
    is_limited = problem.move is not None and problem.move.max_copies_per_layer is not None
    keeps_groups = engine_default(posed) == name == "eplb-hierarchical"
    given = {
        "--pin": bool(problem.pins),
        "--max-moves": is_limited,
        "--groups": problem.grouping is not None and not keeps_groups,
    }
    ignored = [flag for flag, is_set in given.items() if is_set]
    if ignored:
        raise ConfigError(
            f"--solver {name} ignores {', '.join(ignored)}: leave them out, or plan with "
            "search or ilp."
        )


def fan_out_solver(base: Solver, posed: Posed, slack: float) -> Solver:
    """Returns a solver that starts from the plan of `base` and puts a token's experts on few nodes.
    Raises ConfigError."""
    if posed.workloads.tokens is None:
        raise ConfigError(
            "--objective fan-out needs the choices of single tokens: give traces with --trace, all "
            "of the same top-k, and no tables of loads."
        )
    from experts.placement.solvers.fan_out.solver import FanOutOptions, FanOutSolver

    return FanOutSolver(posed.workloads.tokens, base, FanOutOptions(cap=slack))


def engine_default(posed: Posed) -> str:
    """Returns the method that SGLang and vLLM use by default: by groups if these divide over the
    nodes."""
    num_nodes, groups = posed.problem.devices.num_nodes, groups_of(posed)
    return "eplb-hierarchical" if num_nodes > 1 and groups % num_nodes == 0 else "eplb"


def groups_of(posed: Posed) -> int:
    """Returns the number of expert groups, as requested or as the model's router has them; 1 means
    no groups."""
    grouping = posed.problem.grouping
    return posed.model.num_groups if grouping is None else grouping.num_groups


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
    solver: Solver, problem: PlacementProblem, seconds: float | None, interrupts: Interrupts
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
