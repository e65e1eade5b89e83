"""Draws a timeline: one row per rank, colours for micro-batches, tones for stages, grey for
waiting.

matplotlib is an optional extra (`plot`) and is imported by the function that draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.errors import TimelineError
from moe_serve.pipeline.timeline.pool_metrics import TimelineMetrics
from moe_serve.pipeline.timeline.timeline_recorder import WAITING, Records, Role, Stage, Track

MAX_BARS = 20_000
MICRO_BATCH_COLOURS = ("#2f6db5", "#e08a1e", "#3b9a57", "#b0478f")
_WAITING_COLOUR = "#e4e4e4"
_OTHER_COLOUR = "#7a5c46"  # stages that belong to no micro-batch
_LEGEND_COLOUR = "#5f6670"  # legend of the tones
_BAR_HEIGHT = 0.72
_WAITING_HEIGHT = 0.28
_BACKGROUND = "#ffffff"
_DENSE = 24  # more bars than this of one stage, micro-batch and row are dense


@dataclass(frozen=True, slots=True)
class _Tone:
    """The look of a stage: `depth` of the micro-batch's colour (0 = white), and a hatch."""

    depth: float
    hatch: str
    label: str


_MAIN = _Tone(1.0, "", "attention, experts")
_TRANSFER = _Tone(0.45, "//////", "dispatch, send")
_LIGHT = _Tone(0.3, "", "pack, combine")
_SHARED = _Tone(0.65, "......", "shared expert")
_TONES: Mapping[Stage, _Tone] = {
    Stage.ATTENTION: _MAIN,
    Stage.EXPERTS: _MAIN,
    Stage.DISPATCH: _TRANSFER,
    Stage.SEND: _TRANSFER,
    Stage.PACK: _LIGHT,
    Stage.COMBINE: _LIGHT,
    Stage.SHARED: _SHARED,
    Stage.LOGITS: _MAIN,
    Stage.SAMPLE: _LIGHT,
    Stage.SCHEDULE: _MAIN,
    Stage.PUBLISH: _LIGHT,
}
_OTHERS: Mapping[Stage, str] = {
    Stage.LOGITS: "logits",
    Stage.SAMPLE: "sample",
    Stage.SCHEDULE: "schedule",
    Stage.PUBLISH: "publish",
}


def require_matplotlib() -> None:
    """Raises TimelineError with the package to install if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise TimelineError(
            "drawing a timeline needs matplotlib: pip install 'moe-serve[plot]'"
        ) from error


def draw_timeline(
    tracks: Mapping[Track, Records], metrics: TimelineMetrics, title: str, path: Path
) -> None:
    """Draws all of `tracks` into a picture; the file's suffix sets its format."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 2.3 + 0.62 * len(tracks)), layout="constrained")
    axes = figure.subplots()
    draw_rows(axes, tracks)
    axes.set_title(f"{title}\n{describe(metrics)}", loc="left", fontsize=12, linespacing=1.5)
    add_legend(figure, tracks)
    try:
        figure.savefig(path, dpi=130, facecolor=_BACKGROUND)
    except (OSError, ValueError) as error:
        raise TimelineError(f"cannot draw into {path}: {error}") from error


def describe(metrics: TimelineMetrics) -> str:
    """Returns the figures of the title as text."""
    pools = [f"{pool.role.value} {pool.bubble_ratio:.0%}" for pool in metrics.pools]
    mean_ms = metrics.elapsed_ns / metrics.num_steps / 1e6
    step = f"step {mean_ms:.2f} ms" if metrics.num_steps == 1 else f"{mean_ms:.2f} ms a step"
    return (
        f"{step}   |   idle: {', '.join(pools)}   |   "
        f"exposed communication {metrics.exposed_communication_ratio:.0%}, "
        f"with the experts idle as well {metrics.exposed_transfer_ratio:.0%}"
    )


def draw_rows(axes: Any, tracks: Mapping[Track, Records]) -> None:
    """Draws a row for each rank, coordinator and attention ranks on top, time in ms from the first
    bar.
    """
    num_bars = sum(len(records) for records in tracks.values())
    if num_bars > MAX_BARS:
        raise TimelineError(
            f"{num_bars} stages are too many for one picture (at most {MAX_BARS}): "
            "choose fewer with --step or --layers"
        )
    order = sorted(tracks, key=lambda track: (list(Role).index(track.role), track.index))
    zero_ns = min(int(records["start_ns"].min()) for records in tracks.values())
    end_ns = max(int(records["end_ns"].max()) for records in tracks.values())
    axes.set_xlim(0, (end_ns - zero_ns) / 1e6)
    axes.set_ylim(len(order) - 0.5, -0.5)
    for row, track in enumerate(order):
        _draw_row(axes, row, tracks[track], zero_ns, end_ns)
    for row in range(1, len(order)):
        if order[row].role is not order[row - 1].role:
            axes.axhline(row - 0.5, color="#909090", linewidth=0.8)
    axes.set_yticks(range(len(order)), [str(track) for track in order], fontsize=11)
    note = "; the numbers in the bars are layers" if axes.texts else ""
    axes.set_xlabel(f"ms{note}", fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_row(axes: Any, row: int, records: Records, zero_ns: int, end_ns: int) -> None:
    for stage in np.unique(records["stage"]).tolist():
        of_stage = records[records["stage"] == stage]
        if stage == Stage.STEP:
            for begin_ns in of_stage["start_ns"].tolist():
                place = (begin_ns - zero_ns) / 1e6
                axes.plot([place] * 2, [row - 0.47, row + 0.47], color="black", linewidth=0.8)
            continue
        for micro_batch in np.unique(of_stage["micro_batch"]).tolist():
            chosen = of_stage[of_stage["micro_batch"] == micro_batch]
            starts_ms = (chosen["start_ns"] - zero_ns) / 1e6
            lengths_ms = (chosen["end_ns"] - chosen["start_ns"]) / 1e6
            spans = list(zip(starts_ms.tolist(), lengths_ms.tolist(), strict=True))
            _draw_bars(axes, row, spans, Stage(stage), micro_batch)
    _write_layers(axes, row, records, zero_ns, end_ns)


def _draw_bars(
    axes: Any, row: int, spans: list[tuple[float, float]], stage: Stage, micro_batch: int
) -> None:
    if stage in WAITING:
        place = (row - _WAITING_HEIGHT / 2, _WAITING_HEIGHT)
        axes.broken_barh(spans, place, facecolor=_WAITING_COLOUR, linewidth=0, zorder=1)
        return
    tone, colour = _TONES[stage], colour_of(micro_batch)
    is_dense = len(spans) > _DENSE  # edges and hatches would cover such narrow bars
    axes.broken_barh(
        spans,
        (row - _BAR_HEIGHT / 2, _BAR_HEIGHT),
        facecolor=faded(colour, tone.depth),
        edgecolor=colour if tone.hatch else _BACKGROUND,
        hatch="" if is_dense else tone.hatch,
        linewidth=0 if is_dense else 0.4,
        zorder=2,
    )


def _write_layers(axes: Any, row: int, records: Records, zero_ns: int, end_ns: int) -> None:
    """Writes the layer's number into each large bar that has room for it."""
    main = records[np.isin(records["stage"], [Stage.ATTENTION, Stage.EXPERTS])]
    smallest_ns = (end_ns - zero_ns) * 0.012
    for record in main[main["end_ns"] - main["start_ns"] >= smallest_ns]:
        middle_ms = (int(record["start_ns"]) + int(record["end_ns"]) - 2 * zero_ns) / 2e6
        axes.text(
            middle_ms,
            row,
            str(record["layer"]),
            color="white",
            fontsize=9,
            ha="center",
            va="center",
            clip_on=True,
        )


def add_legend(figure: Any, tracks: Mapping[Track, Records]) -> None:
    """Draws a legend below the picture: the micro-batches, then the stages in grey."""
    from matplotlib.patches import Patch

    found = np.unique(np.concatenate([records["micro_batch"] for records in tracks.values()]))
    stages = np.unique(np.concatenate([records["stage"] for records in tracks.values()])).tolist()
    patches = [
        Patch(facecolor=colour_of(index), label=f"micro-batch {index}")
        for index in found.tolist()
        if index >= 0
    ]
    others = [label for stage, label in _OTHERS.items() if int(stage) in stages]
    if others:
        patches.append(Patch(facecolor=_OTHER_COLOUR, label=", ".join(others)))
    present = [stage for stage in _TONES if int(stage) in stages and stage not in _OTHERS]
    for tone in dict.fromkeys(_TONES[stage] for stage in present):
        patches.append(
            Patch(
                facecolor=faded(_LEGEND_COLOUR, tone.depth),
                edgecolor=_LEGEND_COLOUR,
                hatch=tone.hatch,
                label=tone.label,
                linewidth=0.4,
            )
        )
    if stages and set(stages) & {int(stage) for stage in WAITING}:
        patches.append(Patch(facecolor=_WAITING_COLOUR, label="waiting"))
    figure.legend(
        handles=patches,
        loc="outside lower left",
        ncols=len(patches),
        frameon=False,
        fontsize=10,
        handlelength=1.6,
        columnspacing=1.4,
    )


def colour_of(micro_batch: int) -> str:
    if micro_batch < 0:
        return _OTHER_COLOUR
    return MICRO_BATCH_COLOURS[micro_batch % len(MICRO_BATCH_COLOURS)]


def faded(colour: str, depth: float) -> str:
    """Mixes `colour` with white: depth 1 is the colour, 0 is white."""
    channels = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - channel) * depth):02x}" for channel in channels)
