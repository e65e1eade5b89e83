"""Prints the comparison of two runs as a table for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_serve.bench.report.compare import Difference, compare, differing_settings
from moe_serve.bench.report.report import Report

_STYLES = {"better": "green", "worse": "red"}


def print_comparison(console: Console, a: Report, b: Report) -> None:
    console.print(Text(f"A  {a.model} at {a.url}, {a.created}: {a.workload['mode']}"))
    console.print(Text(f"B  {b.model} at {b.url}, {b.created}: {b.workload['mode']}"))
    table = Table("")
    for name in ("A", "B", "B over A", "95% interval", ""):
        table.add_column(name, justify="left" if not name else "right")
    for row in compare(a, b):
        table.add_row(*comparison_cells(row), style=_STYLES.get(row.verdict, ""))
    console.print(table)
    if not (a.records and b.records):
        console.print("no intervals: they need both runs saved with --save-requests", style="dim")
    for text in differing_settings(a, b):
        console.print(Text(f"note: the runs differ in {text}"), style="yellow")


def comparison_cells(row: Difference) -> tuple[str, ...]:
    """Returns the cells of a row: label, A, B, change, interval, verdict."""
    change = "" if row.change is None else f"{row.change:+.1%}"
    interval = "" if row.interval is None else f"{row.interval[0]:+.1%} to {row.interval[1]:+.1%}"
    label = f"{row.label} ({row.unit})" if row.unit else row.label
    return label, _number(row.a), _number(row.b), change, interval, row.verdict


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
