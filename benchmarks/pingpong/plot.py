"""Plots the ablation: tokens per second over m, with a curve for each delay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .ablation import MICRO_BATCHES, Ablation
from .points import Point

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
