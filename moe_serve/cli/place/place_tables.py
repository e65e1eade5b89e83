"""Prints the report of `moe-serve place` and the comparison of plans, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from experts.placement.judge.balance import Balancedness
from experts.placement.judge.held_out import HeldOut
from experts.placement.judge.plan_judge import Judged
from experts.placement.judge.replicas_worth import Redundancy
from experts.placement.plan_check import gib
from experts.placement.plan_report import PlanReport
from moe_serve.cli.console import counted, wide_console

_TARGET = 0.95  # balancedness for which the least number of replicas is reported


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
            f"{counted(problem.num_replicas, 'replica')} per layer; balanced by {by}",
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
    return f"{words}; a balancedness of {_TARGET} needs at least {more} replicas in each layer"


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


_NUM_SHOWN = 12  # scenarios of the table of distances


def print_held_out(held: HeldOut, console: Console) -> None:
    """Prints balancedness (mean and worst layer) of each held-out scenario, and the drift between
    scenarios."""
    table = Table(box=None, title="each scenario held out (balancedness: mean / worst layer)")
    table.title_justify = "left"
    maker = "plan" if held.is_like_plan else held.solver
    names = (
        "drift from others",
        "plan with it",
        f"{maker} without it",
        f"{held.default} without it",
    )
    table.add_column("scenario", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for each in held.held_out:
        figures = (each.seen, each.unseen, each.default)
        table.add_row(each.scenario, f"{each.drift:.3f}", *map(_told, figures))
    console.print(table, "", _distances(held), "", sep="\n")


def _told(found: Balancedness | None) -> str:
    return "" if found is None else f"{found.mean:.3f} / {found.worst:.3f}"


def _distances(held: HeldOut) -> Table:
    table = Table(box=None, title="drift between scenarios, as total variation of their loads")
    table.title_justify = "left"
    table.add_column("", no_wrap=True)
    for number in range(len(held.scenarios[:_NUM_SHOWN])):
        table.add_column(str(number), justify="right", no_wrap=True)
    for number, row in enumerate(held.drift_SS[:_NUM_SHOWN]):
        cells = (f"{value:.3f}" for value in row[:_NUM_SHOWN])
        table.add_row(f"{number} {held.scenarios[number]}", *cells)
    return table


Column = tuple[str, list[str]]


def judged_tables(plans: Sequence[Judged]) -> list[Table]:
    """Returns tables with one row per plan: evenness of its loads, its steps and its tokens.
    Columns without any figure are left out."""
    names = ("plan", [plan.name for plan in plans])
    even: list[Column] = [
        ("largest load", [f"{plan.objective:.4f}" for plan in plans]),
        ("balancedness", [f"{plan.mean:.3f}" for plan in plans]),
        ("worst layer", [f"{plan.worst:.3f}" for plan in plans]),
        ("p10", [_low(plan, "p10") for plan in plans]),
        ("p50", [_low(plan, "p50") for plan in plans]),
        ("log ratio", [_low(plan, "log_ratio") for plan in plans]),
        ("excess", [_high(plan, "excess") for plan in plans]),
    ]
    if any(plan.layers_with_repeats for plan in plans):
        repeats = [str(plan.layers_with_repeats or "") for plan in plans]
        even.append(("layers with repeats", repeats))
    more = [*_step_columns(plans), *_fan_out_columns(plans)]
    return [_columns([names, *columns]) for columns in (even, more) if columns]


def _columns(columns: Sequence[Column]) -> Table:
    table = Table(box=None)
    for name, _ in columns:
        table.add_column(name, justify="left" if name == "plan" else "right", no_wrap=True)
    for cells in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*cells)
    return table


def scenario_table(plans: Sequence[Judged]) -> Table:
    """Returns balancedness, mean and worst layer, for each scenario."""
    table = Table(box=None)
    table.add_column("scenario", no_wrap=True)
    for plan in plans:
        table.add_column(plan.name, justify="right", no_wrap=True)
    for name in plans[0].scenarios:
        each = [plan.scenarios[name] for plan in plans]
        table.add_row(name, *(f"{b.mean:.3f} / {b.worst:.3f}" for b in each))
    return table


def grid(rows: Sequence[tuple[str, str]]) -> Table:
    """Returns a grid of names and texts."""
    table = Table.grid(padding=(0, 2))
    for name, text in rows:
        if text:
            table.add_row(name, text)
    return table


def _low(plan: Judged, field: str) -> str:
    """Returns the value of the worst scenario."""
    return f"{min(getattr(each, field) for each in plan.scenarios.values()):.3f}"


def _high(plan: Judged, field: str) -> str:
    return f"{max(getattr(each, field) for each in plan.scenarios.values()):.3f}"


def _step_columns(plans: Sequence[Judged]) -> list[Column]:
    steps = [plan.step for plan in plans if plan.step is not None]
    columns = []
    if steps:
        name = f"steps of {steps[0].batch_size}"
        columns.append((name, ["" if p.step is None else f"{p.step.even:.3f}" for p in plans]))
    if any(step.split is not None for step in steps):
        splits = [None if plan.step is None else plan.step.split for plan in plans]
        columns.append(("split", ["" if s is None else f"{s:.3f}" for s in splits]))
    if any(plan.busiest_activated is not None for plan in plans):
        busiest = [plan.busiest_activated for plan in plans]
        columns.append(("activated experts", ["" if b is None else f"{b:.2f}" for b in busiest]))
    return columns


def _fan_out_columns(plans: Sequence[Judged]) -> list[Column]:
    found = [plan.fan_out for plan in plans]
    if not any(found):
        return []
    return [
        ("devices/token", ["" if f is None else f"{f.devices_per_token:.3f}" for f in found]),
        ("nodes/token", ["" if f is None else f"{f.nodes_per_token:.3f}" for f in found]),
        ("rows to other nodes", ["" if f is None else f"{f.cross_node_rows:.3f}" for f in found]),
    ]


def legend(plans: Sequence[Judged]) -> str:
    """Returns the meaning of the columns of `judged_tables`."""
    words = [
        "largest load: of a device over the mean, mean over layers and scenarios (the objective). "
        "balancedness: mean over largest load, 1 is perfect; mean over layers, and of the worst "
        "layer of the worst scenario; p10, p50, log ratio (vLLM's log) and excess (TensorRT-LLM's "
        "(largest - mean) / mean) are the worst scenario's."
    ]
    steps = [plan.step for plan in plans if plan.step is not None]
    if steps:
        drawn = "tokens of the traces" if steps[0].has_tokens else "experts by their loads"
        words.append(
            f"steps of {steps[0].batch_size}: balancedness of {steps[0].num_steps} steps drawn "
            f"from {drawn}; split: the same, with rows split over copies at dispatch so that the "
            "busiest device has least; activated: experts that the busiest device reads in one."
        )
    return " ".join(words)
