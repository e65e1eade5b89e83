"""`moe-serve place`: reads the inputs, plans, writes the plan, and reports its value."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import typer

from experts.placement.formats.plan_text import check_export, render_plan
from experts.placement.plan_file import write_placement
from experts.placement.plan_report import make_report
from experts.placement.problem.placement import Placement
from experts.placement.solution import Solution
from experts.placement.solvers.choice import check_limits, fan_out_solver, make_solver
from experts.placement.sources import ProblemWithSources
from moe_serve.cli.console import check_output
from moe_serve.cli.place.place_inputs import check_devices, check_limits_given, plan_request
from moe_serve.cli.place.place_options import PlanOptions
from moe_serve.cli.place.place_solve import Interrupts, solve
from moe_serve.cli.place.place_tables import print_report
from moe_serve.cli.place.plan_files import write_text
from moe_serve.errors import ConfigError


def check_plan_options(options: PlanOptions) -> None:
    """Checks the options as far as possible without reading a file. Raises ConfigError."""
    check_devices(options.devices, is_needed=True)
    check_limits_given(options.limits)
    if options.seconds is not None and not math.isfinite(options.seconds):
        raise ConfigError(f"--seconds must be 0 or more and finite, got {options.seconds}.")
    exported = None if options.export is None else options.export[1]
    check_output(options.out, exported, options.as_json)


def pose(options: PlanOptions) -> ProblemWithSources:
    """Reads every file and returns the problem. Raises ConfigError, CheckpointError, TraceError,
    PlacementError."""
    sources = plan_request(options).read()
    check_limits(options.solver, sources.problem, sources.num_groups)
    if options.export is not None:
        check_export(options.export[0], sources.problem, sources.plan_facts)
    return sources


def run_plan(options: PlanOptions, sources: ProblemWithSources) -> bool:
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


def _write(options: PlanOptions, sources: ProblemWithSources, solution: Solution) -> list[str]:
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
            f"{num_doubled} copies lay beside another of their expert on a device: what is written "
            "leaves them out, so its loads may differ from the figures above"
        )
    return lines


def _write_ours(placement: Placement, path: Path) -> None:
    try:
        write_placement(placement, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def _needed(name: str, placement: Placement) -> str:
    """Returns how to give the plan to the engine."""
    ranks_of = next(iter(placement.ranks_of.values()))
    num_replicas = sum(map(len, ranks_of)) - placement.num_experts
    return {
        "sglang": f"it goes with --ep-num-redundant-experts {num_replicas} --ep-size "
        f"{placement.num_ranks} and an --ep-dispatch-algorithm",
        "vllm": f"it goes with num_redundant_experts {num_replicas} of --eplb-config",
        "trtllm": "it is moe_config.load_balancer",
        "ascend": "it is eplb_config.expert_map_path of --additional-config",
        "csv": "a row for each copy of an expert",
    }[name]
