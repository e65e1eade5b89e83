"""`moe-serve place show` and `check`: shows a plan under loads, and checks that it fits."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from experts.placement.errors import NotAPlanError, PlacementError
from experts.placement.formats.engine_plan import EnginePlan, PlanFacts
from experts.placement.judge.balance import device_loads
from experts.placement.judge.copies import copies_of
from experts.placement.judge.plan_judge import Judge
from experts.placement.plan_check import check_numbers, gib, misfits, plan_notes, plan_words
from experts.placement.problem.placement import contiguous
from experts.placement.sources import ProblemWithSources
from moe_serve.cli.console import check_output, wide_console
from moe_serve.cli.place.place_heat_map import LoadPicture, check_suffix, draw
from moe_serve.cli.place.place_inputs import check_devices, model_facts, read_devices, show_request
from moe_serve.cli.place.place_options import CheckOptions, ShowOptions
from moe_serve.cli.place.place_tables import judged_tables, scenario_table
from moe_serve.cli.place.plan_files import read_plan, write_text
from moe_serve.errors import ConfigError

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
        console.print(f"{plan.num_doubled} copies lie beside another of their expert on a device.")
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
            f"{num_devices} devices cannot hold equal runs of {loads.num_experts} experts: name "
            "the plan before with --before."
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
