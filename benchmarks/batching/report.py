"""Prints the results as tables, and plots the number of activated experts over the number of
running requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from batching.cost import JoinCost, SplitCost
from batching.duel import DuelResult
from batching.queue import QueueCount
from batching.splits import SplitCount
from harness.interval import Interval


@dataclass(frozen=True, slots=True)
class SplitRow:
    """The results of a policy with one number of running requests, over all draws."""

    size: int
    policy: str
    activated: float
    ratio: Interval

    @staticmethod
    def of(draws: Sequence[Sequence[SplitCount]]) -> list[SplitRow]:
        return [
            SplitRow(
                each[0].size,
                each[0].policy,
                float(np.mean([count.activated for count in each])),
                Interval.of([count.ratio for count in each]),
            )
            for each in zip(*draws, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class QueueRow:
    """The results of a policy with a pool of waiting requests, over all runs."""

    size: int
    pool: int
    policy: str
    activated: float
    ratio: Interval
    mean_wait: float
    longest_wait: int

    @staticmethod
    def of(runs: Sequence[Sequence[QueueCount]]) -> list[QueueRow]:
        return [
            QueueRow(
                each[0].size,
                each[0].pool,
                each[0].policy,
                float(np.mean([count.activated for count in each])),
                Interval.of([count.ratio for count in each]),
                float(np.mean([count.mean_wait for count in each])),
                max(count.longest_wait for count in each),
            )
            for each in zip(*runs, strict=True)
        ]


@dataclass(slots=True)
class BatchingReport:
    """All results of a run."""

    environment: dict[str, str]
    num_groups: int
    num_pieces: dict[str, int] = field(default_factory=dict)
    splits: list[SplitRow] = field(default_factory=list)
    bursts: list[SplitRow] = field(default_factory=list)  # choosing among `burst` times the seats
    burst: int = 4
    queues: list[QueueRow] = field(default_factory=list)
    costs: list[SplitCost] = field(default_factory=list)
    joins: list[JoinCost] = field(default_factory=list)
    duels: list[DuelResult] = field(default_factory=list)


def print_report(report: BatchingReport) -> None:
    console = Console()
    groups = f"{report.num_groups} micro-batches"
    titles = (
        f"One set of requests, {groups}: activated experts, all layers",
        f"A burst of {report.burst} requests for each seat, {groups}",
    )
    for title, found in zip(titles, (report.splits, report.bursts), strict=True):
        rows = [
            (f"{r.size}", r.policy, f"{r.activated:.1f}", r.ratio.percent_below_one())
            for r in found
        ]
        _print(console, title, ("running", "policy", "activated", "below fifo [95%]"), rows)
    if report.queues:
        columns = (
            "running",
            "waiting",
            "policy",
            "activated",
            "below fifo [95%]",
            "wait",
            "longest",
        )
        queue_rows = [
            (
                f"{r.size}", f"{r.pool}", r.policy, f"{r.activated:.1f}",
                r.ratio.percent_below_one(), f"{r.mean_wait:.0f}", f"{r.longest_wait}",
            )
            for r in report.queues
        ]  # fmt: skip
        _print(console, f"With a queue, {groups}; waits in steps", columns, queue_rows)
    _print_costs(console, report)
    for duel in report.duels:
        same = "the same tokens" if duel.is_same_tokens else "OTHER TOKENS"
        console.print(
            f"{duel.size} running, {duel.num_requests} requests: {duel.policy} "
            f"{duel.tokens_s:.0f} tokens per processor second, fifo {duel.fifo_tokens_s:.0f}: "
            f"ratio {duel.ratio.mean:.3f} [{duel.ratio.low:.3f}, {duel.ratio.high:.3f}], {same}"
        )


def _print_costs(console: Console, report: BatchingReport) -> None:
    if report.costs:
        columns = (
            "sequences",
            "layers",
            "experts",
            "first ms",
            "changed ms",
            "p99 ms",
            "settled ms",
        )
        cost_rows = [
            (
                f"{c.num_sequences}", f"{c.num_layers}", f"{c.num_experts}", f"{c.first_ms:.2f}",
                f"{c.changed_ms:.2f}", f"{c.changed_worst_ms:.2f}", f"{c.settled_ms:.2f}",
            )
            for c in report.costs
        ]  # fmt: skip
        _print(console, "Time of a split, one core", columns, cost_rows)
    join_columns = ("waiting", "free seats of 64", "layers", "experts", "ms", "p99 ms")
    join_rows = [
        (
            f"{c.num_waiting}", f"{c.num_free}", f"{c.num_layers}", f"{c.num_experts}",
            f"{c.median_ms:.2f}", f"{c.worst_ms:.2f}",
        )
        for c in report.joins
    ]  # fmt: skip
    _print(console, "Time to choose who joins, one core", join_columns, join_rows)


def _print(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]
) -> None:
    if not rows:
        return
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


_STYLES = {
    "balanced": ("0.6", "s"),
    "history": ("tab:blue", "o"),
    "predictor": ("tab:green", "^"),
    "predictor and history": ("tab:orange", "D"),
    "next 32 tokens known": ("tab:purple", "v"),
    "oracle": ("black", "*"),
}


def plot_counts(report: BatchingReport, path: Path) -> None:
    """Draws two plots: one set of requests, split; and the largest queue that was counted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    most = max(row.pool // row.size for row in report.queues)
    queues = [row for row in report.queues if row.pool == most * row.size]
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), sharey=True, layout="constrained")
    panels = (
        (axes[0], report.splits, "one set of requests, split in two"),
        (axes[1], report.bursts, f"the best of a burst of {report.burst} for each seat"),
        (axes[2], queues, f"{most} waiting for each seat, all served in the end"),
    )
    for axis, rows, title in panels:
        _draw(axis, rows)
        axis.set_title(title)
        axis.set_xlabel("running requests")
        axis.axhline(12, color="0.8", linestyle="--", linewidth=1)
        if rows:
            axis.legend(fontsize=7, loc="lower center", ncol=2)
    axes[0].set_ylim(bottom=-6)
    axes[0].set_ylabel("activated experts below fifo, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axis: object, rows: list[SplitRow] | list[QueueRow]) -> None:
    if not rows:
        return
    names = dict.fromkeys(row.policy for row in rows if row.policy in _STYLES)
    for offset, name in enumerate(names):
        own = [row for row in rows if row.policy == name]
        colour, marker = _STYLES[name]
        saved = [100 * (1 - row.ratio.mean) for row in own]
        below = [100 * (row.ratio.high - row.ratio.mean) for row in own]
        above = [100 * (row.ratio.mean - row.ratio.low) for row in own]
        places = [row.size + 0.6 * (offset - len(names) / 2) for row in own]
        axis.errorbar(  # type: ignore[attr-defined]
            places, saved, yerr=(below, above), label=name, color=colour, marker=marker, capsize=3
        )
    axis.set_xticks(sorted({row.size for row in rows}))  # type: ignore[attr-defined]
