"""`moe-serve place compare`: judges the plan, the reference methods and plans from files alike."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from experts.placement.errors import PlacementError
from experts.placement.judge.plan_judge import Judge, Judged
from experts.placement.solvers.choice import make_solver
from experts.placement.sources import ProblemWithSources
from moe_serve.cli.console import check_output, wide_console
from moe_serve.cli.place.place_inputs import compare_request
from moe_serve.cli.place.place_options import CompareOptions
from moe_serve.cli.place.place_solve import Interrupts, solve
from moe_serve.cli.place.place_tables import judged_tables, legend, scenario_table
from moe_serve.cli.place.plan_files import read_plan, write_text


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
