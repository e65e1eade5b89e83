"""Draws the figure of docs/operate/timeline.md: a step with 1, 2 and 3 micro-batches.

PYTHONPATH=scripts python -m pictures.timeline_figure [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from moe_serve.pipeline.timeline.pool_metrics import measure
from moe_serve.pipeline.timeline.timeline import Role, Track
from moe_serve.pipeline.timeline.timeline_plot import add_legend, describe, draw_rows
from pictures.simulated_timeline import SimulatedPipeline, StageTimes

TARGET = Path(__file__).parents[2] / "docs" / "images" / "timeline.png"


def main(path: Path) -> None:
    times = StageTimes(transfer_ns=90_000)
    figure = Figure(figsize=(15, 8.2), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    longest_ms = 0.0
    for num_micro_batches, axes in enumerate(panels, start=1):
        pipeline = SimulatedPipeline(1, 1, num_layers=6, times=times)
        pipeline.run_step(0, num_micro_batches)
        tracks = pipeline.tracks()
        metrics = measure(tracks)
        del tracks[Track(Role.COORDINATOR, 0)]
        draw_rows(axes, tracks)
        noun = "micro-batch" if num_micro_batches == 1 else "micro-batches"
        axes.set_title(f"{num_micro_batches} {noun}:  {describe(metrics)}", loc="left", fontsize=12)
        axes.set_xlabel(axes.get_xlabel() if num_micro_batches == 3 else "")
        longest_ms = max(longest_ms, metrics.elapsed_ns / 1e6)
    panels[0].set_xlim(0, longest_ms)
    add_legend(figure, tracks)
    figure.savefig(path, dpi=110, facecolor="white")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
