"""`moe-serve timeline`: shows what the ranks did and when, as a table and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_serve.cli.console import check_output, wide_console
from moe_serve.cli.options import REQUIRED, argument, option, with_options
from moe_serve.errors import TimelineError

if TYPE_CHECKING:
    from moe_serve.pipeline.timeline.pool_metrics import TimelineMetrics
    from moe_serve.pipeline.timeline.timeline_reader import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOptions:
    """Options of `timeline`."""

    file: Path = argument(
        REQUIRED, help="Timeline file written by `moe-serve serve --timeline FILE`."
    )
    out: Path | None = option(
        None,
        help="File for the picture; its suffix, such as .png or .svg, sets the format.",
        show_default="FILE with the suffix .png",
    )
    step: int | None = option(
        None,
        help="Number of the step to summarise and draw. Cannot be combined with --steps.",
        show_default="the middle one",
    )
    steps: str | None = option(
        None, metavar="A:B", help="Range of steps to summarise and draw; A and B are included."
    )
    layers: str | None = option(
        None,
        metavar="A:B",
        help="Range of layers to draw; A and B are included. Default: all layers.",
    )


@with_options(TimelineOptions)
def timeline(options: TimelineOptions) -> None:
    """Summarise a recorded timeline and draw it.

    Prints how busy the attention ranks and expert ranks were, and writes a picture of the steps.
    """
    from moe_serve.pipeline.timeline.pool_metrics import measure
    from moe_serve.pipeline.timeline.timeline_plot import draw_timeline
    from moe_serve.pipeline.timeline.timeline_reader import read_timeline

    if options.step is not None and options.steps is not None:
        raise TimelineError("--step and --steps cannot be combined: give one of them")
    bounds = (
        _bounds("--steps", options.steps) if options.step is None else (options.step, options.step)
    )
    shown_layers = _bounds("--layers", options.layers)
    path = options.out or options.file.with_suffix(".png")
    check_output(path)
    if not path.suffix:
        raise TimelineError(
            f"{path} has no suffix that names a picture format: call it {path}.png, or .svg."
        )
    whole = read_timeline(options.file)
    _check_steps(whole, bounds)
    chosen = whole if bounds is None else whole.between(*bounds)
    metrics = measure(chosen.tracks)
    _print(wide_console(), chosen, metrics)
    if bounds is None:
        middle = metrics.steps[metrics.num_steps // 2]
        bounds = (middle, middle)
        chosen = chosen.between(*bounds)
        metrics = measure(chosen.tracks)
    drawn = chosen if shown_layers is None else chosen.around_layers(*shown_layers)
    draw_timeline(drawn.tracks, metrics, _title(bounds, metrics, shown_layers), path)
    typer.echo(f"{_title(bounds, metrics, shown_layers)}: {path}")


def _bounds(flag: str, text: str | None) -> tuple[int, int] | None:
    """Parses "3:7" and "3" as (3, 7) and (3, 3)."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (first.isdecimal() and (last.isdecimal() if colon else True)):
        raise TimelineError(f"{flag} cannot be {text!r}: it takes A:B with two whole numbers")
    bounds = (int(first), int(last) if colon else int(first))
    if bounds[1] < bounds[0]:
        raise TimelineError(f"{flag} cannot be {text!r}: {bounds[1]} comes before {bounds[0]}")
    return bounds


def _check_steps(whole: Timeline, bounds: tuple[int, int] | None) -> None:
    steps = whole.steps()
    if bounds is not None and not any(bounds[0] <= step <= bounds[1] for step in steps):
        wanted = (
            f"step {bounds[0]}" if bounds[0] == bounds[1] else f"step {bounds[0]} to {bounds[1]}"
        )
        raise TimelineError(f"the timeline holds steps {steps[0]} to {steps[-1]}, not {wanted}")


def _title(
    bounds: tuple[int, int], metrics: TimelineMetrics, layers: tuple[int, int] | None
) -> str:
    first, last = bounds
    name = f"Step {first}" if first == last else f"Steps {first} to {last}"
    counts = [str(m) for m in metrics.steps_by_micro_batches]
    noun = "micro-batch" if counts == ["1"] else "micro-batches"
    part = "" if layers is None else f", layers {layers[0]} to {layers[1]}"
    ranks = " and ".join(f"{pool.num_ranks} {pool.role.value}" for pool in metrics.pools)
    return f"{name}{part}, {' or '.join(counts) or 'no'} {noun}, {ranks} ranks"


def _print(console: Console, chosen: Timeline, metrics: TimelineMetrics) -> None:
    slowest_step, longest_ns = metrics.slowest_step
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "steps",
        f"{metrics.num_steps}, {_ms(metrics.elapsed_ns / metrics.num_steps)} ms each; "
        f"the longest is {slowest_step} with {_ms(longest_ns)} ms",
    )
    counts = [f"{num} with {m}" for m, num in metrics.steps_by_micro_batches.items()]
    facts.add_row("micro-batches", ", ".join(counts) or "none")
    facts.add_row(
        "exposed communication",
        f"{metrics.exposed_communication_ratio:.1%} of the step time, "
        f"with the experts idle as well {metrics.exposed_transfer_ratio:.1%}",
    )
    for name, number in (("lost", chosen.num_lost), ("left out", chosen.num_left_out)):
        if number:
            facts.add_row(f"records {name}", f"{number}: the figures do not include these")
    if chosen.is_cut:
        facts.add_row(
            "the end", "is missing: the server was killed while writing, or is still running"
        )
    console.print(facts)
    console.print(_pools(metrics))
    console.print(_stages(metrics))


def _pools(metrics: TimelineMetrics) -> Table:
    table = Table(
        "pool", "ranks", "busy ms/step", "bubble", "slowest rank", "more busy than others"
    )
    for pool in metrics.pools:
        table.add_row(
            pool.role.value,
            str(pool.num_ranks),
            _ms(pool.busy_ns / pool.num_ranks / metrics.num_steps),
            f"{pool.bubble_ratio:.1%}",
            str(pool.slowest),
            f"{pool.slowest_excess:.1%}" if pool.num_ranks > 1 else "",
        )
    return table


def _stages(metrics: TimelineMetrics) -> Table:
    table = Table("rank", "stage", "ms/step", "share", "times/step", "rows")
    for name in ("ms/step", "share", "times/step", "rows"):
        next(column for column in table.columns if column.header == name).justify = "right"
    previous = None
    for total in metrics.stages:
        table.add_row(
            Text(str(total.track) if total.track != previous else ""),
            total.stage.label,
            _ms(total.total_ns / metrics.num_steps),
            f"{total.total_ns / metrics.elapsed_ns:.1%}" if metrics.elapsed_ns else "",
            f"{total.num_records / metrics.num_steps:.1f}",
            str(total.num_rows),
        )
        previous = total.track
    return table


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f}"
