"""`moe-serve place compare`: judges the plan, the reference methods and plans from files alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from experts.placement.errors import PlacementError
from experts.placement.judge.plan_judge import Judge, Judged, solution_copies
from experts.placement.problem.limits import Grouping
from experts.placement.problem.problem import PlacementProblem
from experts.placement.sources import Posed, ProblemOrder
from moe_serve.cli.console import check_output, wide_console
from moe_serve.cli.place.place_solve import (
    Interrupts,
    engine_default,
    groups_of,
    make_solver,
    solve,
)
from moe_serve.cli.place.plan_files import write_text
from moe_serve.cli.place.report.place_tables import judged_tables, legend, scenario_table


def run_compare(parameters: Mapping[str, Any]) -> bool:
    """Runs the command; False if it was interrupted, with the plans so far. Raises ConfigError,
    PlacementError."""
    path: Path | None = parameters["as_json"]
    check_output(path)
    posed = ProblemOrder.of(parameters).pose()
    judge = Judge(posed)
    plans = [_read(path, posed, judge) for path in parameters["plan"] or ()]
    unsolved = []
    with Interrupts() as interrupts:
        for name, problem in _problems(posed):
            solver = make_solver("search" if name.startswith("plan") else name, posed)
            try:
                solution = solve(solver, problem, parameters["seconds"], interrupts)
            except PlacementError as error:
                unsolved.append(f"{name}: {error}")
                continue
            plans.append(judge.judge(name, solution_copies(solution, problem)))
    _print(posed, plans, unsolved)
    if path is not None:
        document = {
            "engine_default": engine_default(posed),
            "plans": [asdict(each) for each in plans],
            "unsolved": unsolved,
        }
        write_text(path, json.dumps(document, indent=1) + "\n")
    if interrupts.has_come:
        typer.echo("interrupted: plans of the search are the best so far")
    return not interrupts.has_come


def _problems(posed: Posed) -> list[tuple[str, PlacementProblem]]:
    """Returns names and problems. Groups bind the hierarchical reference and one plan of ours that
    keeps them too."""
    free = replace(posed.problem, grouping=None)
    found = [("plan", free)]
    groups, num_nodes = groups_of(posed), free.devices.num_nodes
    if groups > 1 and num_nodes > 1:
        grouping = posed.problem.grouping or Grouping(num_groups=groups)
        with suppress(PlacementError):  # if no plan can keep the groups
            found.append(("plan, groups on nodes", replace(free, grouping=grouping)))
        found.append(("eplb-hierarchical", free))
    return [*found, *((name, free) for name in ("eplb", "round-robin", "linear"))]


def _print(posed: Posed, plans: list[Judged], unsolved: list[str]) -> None:
    console = wide_console()
    for table in judged_tables(plans):
        console.print(table, "", sep="\n")
    console.print(legend(plans), "", sep="\n")
    if len(posed.problem.loads.scenarios) > 1:
        console.print(scenario_table(plans), "", sep="\n")
    console.print(f"The engines' own default here is {engine_default(posed)}.", *unsolved, sep="\n")


def _read(path: Path, posed: Posed, judge: Judge) -> Judged:
    plan = posed.read_plan(path)
    loads, num_devices = posed.problem.loads, len(posed.problem.devices)
    plan.placement.check_fits(loads.layers, loads.num_experts, num_devices)
    return judge.judge(path.name, plan.copies_LED)
