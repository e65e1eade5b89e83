"""`moe-serve place`: reads the inputs, plans, writes the plan, and reports its value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from experts.placement.formats.plan_text import render_plan
from experts.placement.plan_file import write_placement
from experts.placement.plan_report import make_report
from experts.placement.problem.devices import Devices
from experts.placement.problem.placement import Placement
from experts.placement.solution import Solution
from experts.placement.sources import Posed, ProblemOrder
from moe_serve.cli.console import check_output
from moe_serve.cli.place.place_solve import (
    Interrupts,
    check_limits,
    fan_out_solver,
    make_solver,
    solve,
)
from moe_serve.cli.place.plan_files import write_text
from moe_serve.cli.place.report.place_tables import print_report
from moe_serve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrder:
    """The options of the command, checked as far as possible without reading a file."""

    problem: ProblemOrder
    solver: str
    is_fan_out: bool
    slack: float
    seconds: float | None
    out: Path | None
    export: tuple[str, Path] | None
    as_json: Path | None
    is_quick: bool

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> PlanOrder:
        """Takes the options from the parameters of the command by name. Raises ConfigError."""
        export = parameters["export"]
        order = cls(
            problem=ProblemOrder.of(parameters),
            solver=parameters["solver"],
            is_fan_out=parameters["objective"] == "fan-out",
            slack=parameters["slack"],
            seconds=parameters["seconds"],
            out=parameters["out"],
            export=None if export is None else (export[0], Path(export[1])),
            as_json=parameters["as_json"],
            is_quick=parameters["is_quick"],
        )
        if order.seconds is not None and not math.isfinite(order.seconds):
            raise ConfigError(f"--seconds must be 0 or more and finite, got {order.seconds}.")
        exported = None if order.export is None else order.export[1]
        check_output(order.out, exported, order.as_json)
        return order


def pose(order: PlanOrder) -> Posed:
    """Reads every file and returns the problem. Raises ConfigError, CheckpointError, TraceError,
    PlacementError."""
    posed = order.problem.pose()
    check_limits(order.solver, posed)
    if order.export is not None:
        _check_export(order.export[0], posed)
    return posed


def run_plan(order: PlanOrder, posed: Posed) -> bool:
    """Plans and reports; False if interrupted, with the best plan so far written. Raises
    ConfigError, PlacementError."""
    with Interrupts() as interrupts:
        solver = make_solver(order.solver, posed, thorough=order.seconds is not None)
        if order.is_fan_out:
            solver = fan_out_solver(solver, posed, order.slack)
        solution = solve(solver, posed.problem, order.seconds, interrupts)
        written = _write(order, posed, solution)
        is_whole = not interrupts.has_come
        report = make_report(
            posed,
            solution,
            order.seconds,
            interrupts,
            is_quick=order.is_quick or not is_whole,
        )
    print_report(report)
    if order.as_json is not None:
        write_text(order.as_json, json.dumps(report.as_json(), indent=1) + "\n")
    if not is_whole:
        typer.echo("interrupted: this is the best plan so far")
    for line in written:
        typer.echo(line)
    return is_whole


def _write(order: PlanOrder, posed: Posed, solution: Solution) -> list[str]:
    """Writes the plan and returns lines that say where it is. Raises ConfigError."""
    lines = []
    if order.out is not None:
        _write_ours(solution.placement, order.out)
        ranks = f"--attention-ranks 1 --expert-ranks {len(posed.problem.devices)}"
        lines.append(
            f"the plan is in {order.out}; moe-serve serve --placement {order.out} {ranks} runs it"
        )
    if order.export is not None:
        name, path = order.export
        write_text(path, render_plan(name, solution.placement, posed.plan_facts))
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


def _check_export(name: str, posed: Posed) -> None:
    """Checks before planning that the export format takes plans of these devices."""
    problem = posed.problem
    stand_in = _filled(problem.devices, problem.loads.num_experts, problem.loads.layers)
    render_plan(name, stand_in, posed.plan_facts)
    if not problem.fill and name != "csv":
        raise ConfigError(f"--no-fill may leave slots empty, and {name} wants all of them used.")


def _filled(devices: Devices, num_experts: int, layers: tuple[int, ...]) -> Placement:
    """Fills every slot with experts in turn."""
    ranks: list[list[int]] = [[] for _ in range(num_experts)]
    slot = 0
    for rank, device in enumerate(devices.devices):
        for _ in range(min(device.num_slots, num_experts)):
            ranks[slot % num_experts].append(rank)
            slot += 1
    ranks_of = dict.fromkeys(layers, tuple(map(tuple, ranks)))
    return Placement(num_ranks=len(devices), num_experts=num_experts, ranks_of=ranks_of)


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
