"""`moe-serve place show` and `check`: show a plan under loads, and check that it fits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from experts.placement.formats.engine_plan import EnginePlan, PlanFacts
from experts.placement.judge.balance import device_loads
from experts.placement.judge.copies import copies_of
from experts.placement.judge.plan_judge import Judge
from experts.placement.placement_error import NotAPlanError, PlacementError
from experts.placement.plan_check import check_numbers, gib, misfits, plan_notes, plan_words
from experts.placement.problem.placement import contiguous
from experts.placement.problem_sources import ProblemWithSources
from moe_serve.cli.console import check_output, wide_console
from moe_serve.cli.place.place_inputs import (
    check_devices,
    model_facts,
    read_devices,
    read_plan,
    show_request,
    write_text,
)
from moe_serve.cli.place.place_options import CheckOptions, ShowOptions
from moe_serve.cli.place.place_tables import judged_tables, scenario_table
from moe_serve.errors import ConfigError

_LOW, _HIGH = 0.5, 2.0  # multiples of the mean; beyond them the colour does not change
_BLUE, _WHITE, _RED = (33, 102, 172), (247, 247, 247), (178, 24, 43)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPicture:
    """One panel: loads over the layer's mean [L, D]."""

    title: str
    loads_LD: NDArray[np.float64]
    layers: Sequence[int]


def check_suffix(path: Path) -> None:
    """Raises ConfigError for a file name that is neither *.png nor *.html."""
    if path.suffix not in (".png", ".html"):
        raise ConfigError(f"--heatmap {path} is neither *.png nor *.html.")


def draw(pictures: Sequence[LoadPicture], path: Path) -> None:
    """Draws the pictures in the format that the file's suffix names. Raises ConfigError."""
    if path.suffix == ".html":
        write_text(path, _html(pictures))
    else:
        _png(pictures, path)


def _png(pictures: Sequence[LoadPicture], path: Path) -> None:
    """Draws layers from top to bottom and devices from left to right; white is the layer's mean."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import TwoSlopeNorm
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "a PNG needs matplotlib: pip install 'moe-serve[plot]', or draw *.html."
        ) from None
    num_layers, num_devices = pictures[0].loads_LD.shape
    width = min(20.0, len(pictures) * max(3.0, 1.2 + 0.22 * num_devices) + 1.2)
    figure = Figure(figsize=(width, min(14.0, 2.2 + 0.2 * num_layers)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(pictures), squeeze=False, sharey=True)[0]
    norm = TwoSlopeNorm(vmin=_LOW, vcenter=1.0, vmax=_HIGH)
    for axes, picture in zip(panels, pictures, strict=True):
        image = axes.imshow(
            picture.loads_LD, aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=norm
        )
        axes.set_title(picture.title, fontsize=9, parse_math=False)
        axes.set_xticks(range(0, num_devices, max(1, -(-num_devices // 16))))
        step = max(1, -(-num_layers // 32))
        axes.set_yticks(
            range(0, num_layers, step), [str(layer) for layer in picture.layers[::step]]
        )
        axes.set_xlabel("device")
    panels[0].set_ylabel("layer")
    bar = figure.colorbar(
        image, ax=list(panels), extend="both", ticks=[_LOW, 0.75, 1.0, 1.5, _HIGH]
    )
    bar.set_label("load over the layer's mean")
    try:
        with path.open("wb") as file:
            figure.savefig(file, dpi=130, format="png")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def _html(pictures: Sequence[LoadPicture]) -> str:
    """Returns a self-contained page without scripts; each cell's value is its title."""
    panels = "".join(map(_panel, pictures))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Load of devices</title>'
        "<style>body{font:14px sans-serif;margin:2em}section{display:inline-block;"
        "vertical-align:top;margin-right:3em}table{border-collapse:collapse}td{width:1.1em;"
        "height:1em;padding:0}th{font-weight:normal;text-align:right;padding:0 .4em}"
        "thead th{text-align:center;padding:0}</style>"
        "<p>Load of each device (across) in each layer (down) over the layer's mean: white is the "
        f"mean, blue {_LOW} and less, red {_HIGH} and more.</p>{panels}</html>\n"
    )


def _panel(picture: LoadPicture) -> str:
    num_devices = picture.loads_LD.shape[1]
    step = max(1, -(-num_devices // 16))
    heads = "".join(
        f"<th>{device if device % step == 0 else ''}</th>" for device in range(num_devices)
    )
    rows = "".join(
        f"<tr><th>{layer}</th>"
        + "".join(
            f'<td style="background:{_colour(load)}" title="layer {layer}, device {device}: '
            f'{load:.3f}"></td>'
            for device, load in enumerate(loads_D)
        )
        + "</tr>"
        for layer, loads_D in zip(picture.layers, picture.loads_LD.tolist(), strict=True)
    )
    title = escape(picture.title)
    return (
        f"<section><h2>{title}</h2><table><thead><tr><th></th>{heads}</tr></thead>{rows}</table>"
        "</section>"
    )


def _colour(load: float) -> str:
    """Returns the colour of a load: white at 1, and stronger towards the ends of the scale."""
    end = _BLUE if load < 1.0 else _RED
    reach = (1.0 - load) / (1.0 - _LOW) if load < 1.0 else (load - 1.0) / (_HIGH - 1.0)
    part = min(max(reach, 0.0), 1.0)
    mixed = [round(w + part * (e - w)) for w, e in zip(_WHITE, end, strict=True)]
    return "#" + "".join(f"{value:02x}" for value in mixed)


_NUM_SHOWN = 64  # devices, and layers
_NUM_FAULTS = 8


def run_show(options: ShowOptions) -> None:
    """Runs the command. Raises ConfigError, PlacementError."""
    path, heatmap = options.file, options.heatmap
    check_output(options.as_json, heatmap)
    if heatmap is not None:
        check_suffix(heatmap)
    sources, plan = show_request(options).read()
    layers = sources.problem.loads.layers
    name, before = _before(options.before, sources)
    judge = Judge(sources.problem, sources.workloads.tokens)
    judged = [judge.judge(name, before), judge.judge(path.name, plan.copies_LED)]
    loads_LD = device_loads(sources.problem, plan.copies_LED).mean(axis=0)
    console = wide_console()
    tables = [*judged_tables(judged), _devices(sources, plan, loads_LD)]
    tables.append(_layers(sources, plan, loads_LD))
    if len(sources.problem.loads.scenarios) > 1:
        tables.append(scenario_table(judged))
    for table in tables:
        console.print(table, "", sep="\n")
    if plan.num_doubled:
        console.print(
            f"{plan.num_doubled} copies are on a device that already holds a copy of the same "
            "expert."
        )
    if options.as_json is not None:
        document = {
            "layers": layers,
            "plans": [asdict(each) for each in judged],
            "loads": loads_LD.round(6).tolist(),
        }
        write_text(options.as_json, json.dumps(document, indent=1) + "\n")
    if heatmap is not None:
        former_LD = device_loads(sources.problem, before).mean(axis=0)
        pictures = [
            LoadPicture(
                title=f"{each.name}: balancedness {each.mean:.3f}", loads_LD=loads, layers=layers
            )
            for each, loads in zip(judged, (former_LD, loads_LD), strict=True)
        ]
        draw(pictures, heatmap)
        console.print(f"the heat map is in {heatmap}")


def _before(path: Path | None, sources: ProblemWithSources) -> tuple[str, NDArray[np.int64]]:
    loads, num_devices = sources.problem.loads, len(sources.problem.devices)
    if path is not None:
        plan = sources.read_plan(path, read_plan)
        plan.placement.check_fits(loads.layers, loads.num_experts, num_devices)
        return path.name, plan.copies_LED
    if num_devices > loads.num_experts:
        raise ConfigError(
            f"{loads.num_experts} experts cannot be spread over {num_devices} devices in "
            "equal runs, which is the default plan to compare with: give the earlier plan "
            "with --before."
        )
    runs = contiguous(loads.layers, loads.num_experts, num_devices)
    return "equal runs", copies_of(runs, loads.layers)


def _devices(sources: ProblemWithSources, plan: EnginePlan, loads_LD: NDArray[np.float64]) -> Table:
    """Returns the table of devices, over all layers; memory is shown only if the model is known."""
    weight, layers = sources.problem.bytes_per_expert, sources.problem.loads.layers
    names = ("device", "node", "copies", "load, mean", "load, most", "in layer")
    table = _table(*names, *(() if weight is None else ("memory",)))
    table.title = "devices: load over the mean of the layer"
    copies_LD = plan.copies_LED.sum(axis=1)
    for device, each in enumerate(sources.problem.devices.devices[:_NUM_SHOWN]):
        loads_L = loads_LD[:, device]
        copies = int(copies_LD[:, device].sum())
        table.add_row(
            str(device),
            str(each.node),
            str(copies),
            f"{loads_L.mean():.3f}",
            f"{loads_L.max():.3f}",
            str(layers[int(loads_L.argmax())]),
            *(() if weight is None else (gib(copies * weight),)),
        )
    return table


def _layers(sources: ProblemWithSources, plan: EnginePlan, loads_LD: NDArray[np.float64]) -> Table:
    table = _table("layer", "busiest device", "its load", "hottest expert", "share", "its devices")
    table.title = "layers, mean over scenarios"
    shares_LE = sources.problem.loads.shares_SLE().mean(axis=0)
    for row, layer in enumerate(sources.problem.loads.layers[:_NUM_SHOWN]):
        hottest = int(shares_LE[row].argmax())
        table.add_row(
            str(layer),
            str(int(loads_LD[row].argmax())),
            f"{loads_LD[row].max():.3f}",
            str(hottest),
            f"{shares_LE[row, hottest]:.2%}",
            " ".join(map(str, plan.placement.ranks_of[layer][hottest])),
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, title_justify="left")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def run_check(options: CheckOptions) -> bool:
    """Prints a summary of the plan and every misfit; returns whether it fits. Raises ConfigError if
    a file cannot be read, NotAPlanError if it is not a plan."""
    path = options.file
    check_devices(options.devices, is_needed=False)
    cluster, model = read_devices(options.devices), model_facts(options.model)
    num_devices = None if cluster is None else len(cluster.entries)
    known = PlanFacts.of_model(model, num_devices, options.num_experts)
    try:
        plan = read_plan(path, known)
        check_numbers(plan.placement, known)
    except NotAPlanError:
        raise
    except PlacementError as error:
        typer.echo(f"does not fit: {error}")
        return False
    faults = misfits(plan, cluster, model)
    for fault in faults[:_NUM_FAULTS]:
        typer.echo(f"does not fit: {path}: {fault}")
    if len(faults) > _NUM_FAULTS:
        typer.echo(f"and {len(faults) - _NUM_FAULTS} more like these")
    if not faults:
        typer.echo(f"fits: {path}: {plan_words(plan, model)}")
        for note in plan_notes(plan, cluster, model, known.num_experts):
            typer.echo(f"note: {note}")
    return not faults
