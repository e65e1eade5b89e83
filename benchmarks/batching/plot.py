"""Plots the number of activated experts over the number of running requests."""

from __future__ import annotations

from pathlib import Path

from batching.report import BatchingReport, QueueRow, SplitRow

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
