"""Prints the tables of `pingpong`, and plots the ablation: tokens per second over m, with a curve
for each delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .ablation import MICRO_BATCHES, Ablation
from .calibrated import Expected
from .engines import COLOCATED, EngineTimes
from .points import Point
from .report import PairReport

_COLORS = ("#1b6ca8", "#2a9d8f", "#e9a23b", "#c8553d", "#6d597a")


def plot_ablation(found: Ablation, path: Path) -> None:
    """Draws the plot. Needs matplotlib; raises SystemExit if it is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'moe-serve[plot]'.") from None
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    parts = (
        (f"a batch of {found.batch}, cut into m", found.cut),
        (f"m micro-batches of {found.grown[0].rows}", found.grown),
    )
    for axis, (title, points) in zip(axes, parts, strict=True):
        _draw(axis, title, found, points)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(axis: Any, title: str, found: Ablation, points: Sequence[Point]) -> None:
    slower_s = found.reference.slower_s
    for color, delay_s in zip(_COLORS, found.delays, strict=False):
        chosen = [found.at(points, delay_s, m) for m in MICRO_BATCHES]
        share = delay_s / slower_s
        label = f"delay {1e3 * delay_s:.2f} ms ({share:.2f} T_f)" if delay_s else "no delay"
        measured = [p.tokens_per_s for p in chosen]
        expected = [
            p.num_micro_batches * p.rows / (p.model_s + p.whole_s - p.step_s) for p in chosen
        ]
        axis.plot(MICRO_BATCHES, measured, "o-", color=color, label=label)
        axis.plot(MICRO_BATCHES, expected, "--", color=color, linewidth=1)
    axis.plot([], [], "--", color="gray", linewidth=1, label="expected from stage times")
    axis.set_title(title)
    axis.set_xlabel("micro-batches")
    axis.set_ylabel("tokens per second")
    axis.set_xticks(MICRO_BATCHES)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


_WIDTH = 132


def print_report(report: PairReport) -> None:
    console = Console(width=max(_WIDTH, Console().width))
    console.print(f"model: {report.model}, context {report.context}", markup=False)
    console.print(f"others used {report.busy_cores:.1f} cores just before", markup=False)
    if report.ablation is not None:
        console.print(f"delays are made by {report.ablation.delayed_by}", markup=False)
        console.print(_stages(report.ablation))
        console.print(_points("one batch, cut into m", report.ablation, report.ablation.cut))
        console.print(
            _points("m micro-batches of one size", report.ablation, report.ablation.grown)
        )
        if report.expected:
            console.print(_expected(report.expected))
    if report.engines:
        console.print(_engines(report.engines))
    verdicts = Table("bar", "wanted", "measured", "verdict")
    for verdict in report.verdicts():
        is_met = "met" if verdict.is_met else "missed"
        verdicts.add_row(verdict.what, verdict.wanted, verdict.measured, is_met)
    console.print(verdicts)
    if report.deepspeed is not None:
        console.print(_rival(report), markup=False)


def _rival(report: PairReport) -> str:
    times = report.deepspeed
    assert times is not None, "the caller looks"
    if times.missing:
        return times.missing
    line = f"DeepSpeed's MoE layer, {times.rows} rows a rank: {1e3 * times.layer_s:.2f} ms"
    rival = report.rival_tokens_per_s()
    if report.ablation is None or rival is None:
        return line
    best = max(
        p.num_micro_batches * p.rows / p.step_s for p in report.ablation.cut if not p.delay_s
    )
    return f"{line}; with attention before it {rival:,.0f} tokens/s, 1A1E {best:,.0f}"


def _stages(found: Ablation) -> Table:
    table = _table("rows", "T_a ms", "T_e ms", "T_c ms", title=f"{found.num_layers} layers, alone")
    for times in found.stages:
        seconds = (times.attention_s, times.experts_s, times.transfer_s)
        table.add_row(str(times.rows), *[f"{1e3 * s:.3f}" for s in seconds])
    return table


def _points(title: str, found: Ablation, points: Sequence[Point]) -> Table:
    table = _table(
        "delay ms", "m", "rows", "step ms", "tokens/s", "over m = 1", "over m - 1",
        "formula ms", "error", "extended ms", "error",
        title=title,
    )  # fmt: skip
    for p in points:
        m = p.num_micro_batches
        table.add_row(
            f"{1e3 * p.delay_s:.2f}",
            str(m),
            str(p.rows),
            f"{1e3 * p.step_s:.1f}",
            f"{p.tokens_per_s:,.0f}",
            f"{found.ratio(points, p.delay_s, m, 1):.2f}x",
            f"{found.ratio(points, p.delay_s, m, m - 1):.2f}x" if m > 1 else "",
            f"{1e3 * p.formula_s:.1f}",
            f"{p.formula_error:+.1%}" if p.is_full else "not full",
            f"{1e3 * p.model_s:.1f}",
            f"{p.model_error:+.1%}",
            end_section=m == MICRO_BATCHES[-1],
        )
    return table


def _expected(steps: Sequence[Expected]) -> Table:
    table = _table("m", "step ms", "calibrated ms", "error", title="beside moe-serve calibrate")
    for each in steps:
        times = (f"{1e3 * each.measured_s:.1f}", f"{1e3 * each.expected_s:.1f}")
        table.add_row(str(each.num_micro_batches), *times, f"{each.error:+.1%}")
    return table


def _engines(engines: Sequence[EngineTimes]) -> Table:
    names = list(engines[0].seconds)
    heads = [name if name in (COLOCATED, "auto") else f"m = {name}" for name in names]
    table = _table(
        "batch", *heads, "best over colocated", "auto behind best", "its m", title="ms per step"
    )
    for times in engines:
        _, best_s = times.best_fixed()
        behind = times.auto_behind
        table.add_row(
            str(times.batch),
            *[f"{1e3 * times.seconds[name]:.2f}" for name in names],
            f"{times.seconds[COLOCATED] / best_s:.2f}x",
            f"{behind.share:+.1%} [{behind.low:+.1%}, {behind.high:+.1%}]",
            " ".join(f"{m}:{count}" for m, count in times.auto_cuts.items()),
        )
    return table


def _table(*heads: str, title: str) -> Table:
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table
