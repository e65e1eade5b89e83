"""Prints the table of `kernels`: a row per shape and number of tokens, a column per contestant."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from kernel_bench.measurement import BenchReport, Measurement, WorkResult

_WIDTH = 150


def print_report(report: BenchReport) -> None:
    """Limits, one table per kind of work and set of contestants, then what failed."""
    console = Console(width=max(_WIDTH, Console().width))
    limits = report.limits
    console.print(
        f"{report.device}, {report.dtype}: copies {limits.copy_gb_s:,.1f} GB/s (read and written), "
        f"multiplies {limits.matrix_gflop_s:,.0f} GFLOP/s"
    )
    for work in dict.fromkeys(result.work for result in report.results):
        rows = [result for result in report.results if result.work == work]
        console.print(_table(work, rows))
    console.print("us, medians; % of the limit; * launched by the host, not replayed as a graph")
    for line in _failures(report):
        console.print(line, markup=False)


def _table(work: str, rows: list[WorkResult]) -> Table:
    table = Table(title=work)
    names = list(dict.fromkeys(m.contestant for row in rows for m in row.measurements))
    table.add_column("shape", no_wrap=True)
    for heading in ("tokens", "limit", "set by", *names):
        table.add_column(heading, justify="right")
    for index, row in enumerate(rows):
        by_name = {m.contestant: m for m in row.measurements}
        is_last = index + 1 == len(rows) or rows[index + 1].shape != row.shape
        table.add_row(
            row.shape,
            str(row.num_tokens),
            f"{row.bound.seconds * 1e6:,.1f}",
            row.bound.set_by,
            *(_cell(by_name.get(name), row.bound.seconds) for name in names),
            end_section=is_last,
        )
    return table


def _cell(measurement: Measurement | None, limit_s: float) -> str:
    if measurement is None or measurement.timing is None:
        return "-"
    timing = measurement.timing
    mark = "*" if timing.mode == "eager" else ""
    return f"{timing.seconds * 1e6:,.1f}{mark} {limit_s / timing.seconds:.0%}"


def _failures(report: BenchReport) -> Iterator[str]:
    """Each contestant's failure once per shape and message."""
    seen: set[tuple[str, str, str]] = set()
    for row in report.results:
        for m in row.measurements:
            key = (row.shape, m.contestant, m.failure)
            if m.failure and key not in seen:
                seen.add(key)
                yield f"{m.contestant} on {row.shape}, {row.num_tokens} tokens: {m.failure}"
