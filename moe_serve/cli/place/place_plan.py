"""`moe-serve place` and `place compare`: run solvers, and write and report the plans.

Ctrl-C ends a solver with the best plan so far.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from experts.placement.formats.plan_text import check_export, render_plan
from experts.placement.judge.plan_judge import Judge, Judged
from experts.placement.placement_error import PlacementError
from experts.placement.plan_file import write_placement
from experts.placement.plan_report import make_report
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem
from experts.placement.problem_sources import ProblemWithSources
from experts.placement.solution import Progress, Solution, Solver
from experts.placement.solvers.choice import check_limits, fan_out_solver, make_solver
from moe_serve.cli.console import check_output, wide_console
from moe_serve.cli.place.place_inputs import (
    check_devices,
    check_limits_given,
    compare_request,
    plan_request,
    read_plan,
    write_text,
)
from moe_serve.cli.place.place_options import CompareOptions, PlaceOptions
from moe_serve.cli.place.place_tables import judged_tables, legend, print_report, scenario_table
from moe_serve.errors import ConfigError

_Tell = Callable[[str, float], None]  # a description, and the share that is done
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


def check_plan_options(options: PlaceOptions) -> None:
    """Checks the options as far as possible without reading a file. Raises ConfigError."""
    check_devices(options.devices, is_needed=True)
    check_limits_given(options.limits)
    if options.seconds is not None and not math.isfinite(options.seconds):
        raise ConfigError(f"--seconds must be 0 or more and finite, got {options.seconds}.")
    exported = None if options.export is None else options.export[1]
    check_output(options.out, exported, options.as_json)


def pose(options: PlaceOptions) -> ProblemWithSources:
    """Reads every file and returns the problem. Raises ConfigError, CheckpointError, TraceError,
    PlacementError."""
    sources = plan_request(options).read()
    check_limits(options.solver, sources.problem, sources.num_groups)
    if options.export is not None:
        check_export(options.export[0], sources.problem, sources.plan_facts)
    return sources


def run_plan(options: PlaceOptions, sources: ProblemWithSources) -> bool:
    """Plans and reports; False if interrupted, with the best plan so far written. Raises
    ConfigError, PlacementError."""
    with Interrupts() as interrupts:
        is_thorough = options.seconds is not None
        solver = make_solver(options.solver, sources.num_groups, thorough=is_thorough)
        if options.objective == "fan-out":
            solver = fan_out_solver(solver, sources.workloads.tokens, options.slack)
        solution = solve(interrupts, solver, sources.problem, options.seconds)
        written = _write(options, sources, solution)
        is_whole = not interrupts.has_come
        report = make_report(
            sources,
            solution,
            seconds=options.seconds,
            is_quick=options.is_quick or not is_whole,
            run=partial(solve, interrupts),
            is_ended=lambda: interrupts.has_come,
        )
    print_report(report)
    if options.as_json is not None:
        write_text(options.as_json, json.dumps(report.as_json(), indent=1) + "\n")
    if not is_whole:
        typer.echo("interrupted: this is the best plan so far")
    for line in written:
        typer.echo(line)
    return is_whole


def _write(options: PlaceOptions, sources: ProblemWithSources, solution: Solution) -> list[str]:
    """Writes the plan and returns lines that say where it is. Raises ConfigError."""
    lines = []
    if options.out is not None:
        _write_ours(solution.placement, options.out)
        ranks = f"--attention-ranks 1 --expert-ranks {len(sources.problem.devices)}"
        command = f"moe-serve serve --placement {options.out} {ranks}"
        lines.append(f"the plan is in {options.out}; {command} runs it")
    if options.export is not None:
        name, path = options.export
        write_text(path, render_plan(name, solution.placement, sources.plan_facts))
        lines.append(f"the plan for {name} is in {path}; {_needed(name, solution.placement)}")
    if lines and solution.copies_LED is not None:
        num_doubled = int((solution.copies_LED - 1).clip(min=0).sum())
        lines.append(
            f"{num_doubled} copies were on a device that already has a copy of their expert: the "
            "written plan leaves them out, so its loads may differ from the figures above"
        )
    return lines


def _write_ours(placement: Placement, path: Path) -> None:
    try:
        write_placement(placement, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def _needed(name: str, placement: Placement) -> str:
    """Returns the options with which the other engine takes the plan."""
    ranks_of = next(iter(placement.ranks_of.values()))
    num_replicas = sum(map(len, ranks_of)) - placement.num_experts
    return {
        "sglang": (
            f"use it with --ep-num-redundant-experts {num_replicas} --ep-size "
            f"{placement.num_ranks} and an --ep-dispatch-algorithm"
        ),
        "vllm": f"use it with num_redundant_experts {num_replicas} in --eplb-config",
        "trtllm": "it is moe_config.load_balancer",
        "ascend": "give its path as eplb_config.expert_map_path in --additional-config",
        "csv": "it has one row for each copy of an expert",
    }[name]


def run_compare(options: CompareOptions) -> bool:
    """Runs the command; False if it was interrupted, with the plans so far. Raises ConfigError,
    PlacementError."""
    check_output(options.as_json)
    sources = compare_request(options).read()
    judge = Judge(sources.problem, sources.workloads.tokens)
    plans = [_read(path, sources, judge) for path in options.plan or ()]
    unsolved = []
    with Interrupts() as interrupts:
        for name, problem in sources.rivals():
            method = "search" if name.startswith("plan") else name
            solver = make_solver(method, sources.num_groups)
            try:
                solution = solve(interrupts, solver, problem, options.seconds)
            except PlacementError as error:
                unsolved.append(f"{name}: {error}")
                continue
            plans.append(judge.judge(name, solution.copies()))
    _print(sources, plans, unsolved)
    if options.as_json is not None:
        document = {
            "engine_default": sources.engine_default,
            "plans": [asdict(each) for each in plans],
            "unsolved": unsolved,
        }
        write_text(options.as_json, json.dumps(document, indent=1) + "\n")
    if interrupts.has_come:
        typer.echo("interrupted: plans of the search are the best so far")
    return not interrupts.has_come


def _print(sources: ProblemWithSources, plans: list[Judged], unsolved: list[str]) -> None:
    console = wide_console()
    for table in judged_tables(plans):
        console.print(table, "", sep="\n")
    console.print(legend(plans), "", sep="\n")
    if len(sources.problem.loads.scenarios) > 1:
        console.print(scenario_table(plans), "", sep="\n")
    console.print(
        f"The engines' own default here is {sources.engine_default}.", *unsolved, sep="\n"
    )


def _read(path: Path, sources: ProblemWithSources, judge: Judge) -> Judged:
    plan = sources.read_plan(path, read_plan)
    loads, num_devices = sources.problem.loads, len(sources.problem.devices)
    plan.placement.check_fits(loads.layers, loads.num_experts, num_devices)
    return judge.judge(path.name, plan.copies_LED)
