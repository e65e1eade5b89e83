"""Prints the held-out scenarios and the distances between scenarios."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from experts.placement.judge.balance import Balancedness
from moe_serve.cli.place.place_held_out import HeldOut

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
