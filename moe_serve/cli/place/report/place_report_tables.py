"""Prints the report of `moe-serve place`."""

from __future__ import annotations

from experts.placement.judge.redundancy import Redundancy
from moe_serve.cli.counted import counted
from moe_serve.cli.place.report.place_held_out_tables import print_held_out
from moe_serve.cli.place.report.place_report import PlanReport
from moe_serve.cli.place.report.place_tables import gib, grid, judged_tables, legend, scenario_table
from moe_serve.cli.wide_console import wide_console

_TARGET = 0.95  # balancedness: how many replicas it takes at least


def print_report(report: PlanReport) -> None:
    """Prints the problem, the proof, the plan beside other plans, and its costs."""
    console = wide_console()
    console.print(grid(_facts(report)), "", sep="\n")
    for table in judged_tables(report.plans):
        console.print(table, "", sep="\n")
    console.print(legend(report.plans), "", sep="\n")
    if len(report.problem.loads.scenarios) > 1:
        console.print(scenario_table(report.plans), "", sep="\n")
    if report.held_out is not None:
        print_held_out(report.held_out, console)
    costs = _costs(report)
    if costs:
        console.print(grid(costs))


def _facts(report: PlanReport) -> list[tuple[str, str]]:
    problem, solution = report.problem, report.solution
    loads, devices = problem.loads, problem.devices
    slots = sorted({device.num_slots for device in devices.devices})
    each = f"{slots[0]}" if len(slots) == 1 else f"{slots[0]} to {slots[-1]}"
    by = "rows" if problem.balance == "tokens" else f"activated experts of {problem.batch_size}"
    gap = "proved best" if solution.gap < 1e-6 else f"at most {solution.gap:.2%} above the best"
    ended = "" if solution.is_complete else ", ended early (--seconds gives it more time)"
    return [
        ("model", report.model),
        (
            "loads",
            f"{counted(len(loads.scenarios), 'scenario')}, "
            f"{counted(len(loads.layers), 'layer')} of {loads.num_experts} experts",
        ),
        (
            "devices",
            f"{len(devices)} on {counted(devices.num_nodes, 'node')}, {each} "
            f"{'slot' if each == '1' else 'slots'} each: "
            f"{counted(problem.num_replicas, 'replica')} a layer; balanced by {by}",
        ),
        (
            "plan",
            f"{solution.solver}, {solution.seconds:.2f} s{ended}: objective "
            f"{solution.objective:.4f}, bound {solution.bound:.4f}, {gap}",
        ),
        ("proof", solution.bound_proof),
        ("hottest", _hottest(report.redundancy)),
    ]


def _hottest(redundancy: Redundancy) -> str:
    """Returns the load of the hottest expert and the replicas that it needs at least."""
    words = (
        f"an expert with {redundancy.hottest_share:.1%} of its layer's choices, "
        f"{redundancy.hottest_over_even:.2f} times the even load of a device"
    )
    needed = redundancy.needed(_TARGET)
    more = f"over {len(redundancy.best_H) - 1}" if needed is None else str(needed)
    return f"{words}; balancedness {_TARGET} takes {more} replicas a layer at least"


def _costs(report: PlanReport) -> list[tuple[str, str]]:
    """Returns memory, moves, and the verdict on replicas."""
    rows = []
    memory = report.plan.memory
    if memory is not None:
        low, high = gib(min(memory)), gib(max(memory))
        each = high if low == high else f"{low} to {high}"
        rows.append(("memory", f"{each} of a device for routed experts"))
    if report.moves is not None:
        rows.append(("moves", report.moves.sentence))
    if report.replicas is not None:
        rows.append(("replicas", report.replicas.sentence))
    return rows
