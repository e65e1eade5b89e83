"""Tables of one plan or of several in comparison."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from moe_serve.cli.place.place_judge import Judged

Column = tuple[str, list[str]]

_GIB = 2**30


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


def gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 100 else f"{num_bytes / 1e6:.2f} MB"


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
