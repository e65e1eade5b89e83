"""`moe-serve place show`: shows a plan under loads, beside the plan before it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from experts.placement.formats.engine_plan import EnginePlan
from experts.placement.judge.balance import device_loads
from experts.placement.judge.copies import copies_of
from experts.placement.judge.plan_judge import Judge
from experts.placement.problem.placement import contiguous
from experts.placement.problem.problem import PlacementProblem
from experts.placement.problem.workloads import read_workloads
from experts.placement.sources import Posed, device_order, model_order
from moe_serve.cli.console import check_output, wide_console
from moe_serve.cli.place.plan_files import only_layers, read_plan, write_text
from moe_serve.cli.place.report.place_heat_map import LoadPicture, check_suffix, draw
from moe_serve.cli.place.report.place_tables import gib, judged_tables, scenario_table
from moe_serve.errors import ConfigError

_NUM_SHOWN = 64  # devices, and layers


def run_show(parameters: Mapping[str, Any]) -> None:
    """Runs the command. Raises ConfigError, PlacementError."""
    path, heatmap = parameters["file"], parameters["heatmap"]
    check_output(parameters["as_json"], heatmap)
    if heatmap is not None:
        check_suffix(heatmap)
    posed, plan = _read(parameters, path)
    layers = posed.problem.loads.layers
    name, before = _before(parameters["before"], posed)
    judge = Judge(posed)
    judged = [judge.judge(name, before), judge.judge(path.name, plan.copies_LED)]
    loads_LD = device_loads(posed.problem, plan.copies_LED).mean(axis=0)
    console = wide_console()
    tables = [*judged_tables(judged), _devices(posed, plan, loads_LD)]
    tables.append(_layers(posed, plan, loads_LD))
    if len(posed.problem.loads.scenarios) > 1:
        tables.append(scenario_table(judged))
    for table in tables:
        console.print(table, "", sep="\n")
    if plan.num_doubled:
        console.print(f"{plan.num_doubled} copies lie beside another of their expert on a device.")
    if parameters["as_json"] is not None:
        document = {
            "layers": layers,
            "plans": [asdict(each) for each in judged],
            "loads": loads_LD.round(6).tolist(),
        }
        write_text(parameters["as_json"], json.dumps(document, indent=1) + "\n")
    if heatmap is not None:
        former_LD = device_loads(posed.problem, before).mean(axis=0)
        pictures = [
            LoadPicture(
                title=f"{each.name}: balancedness {each.mean:.3f}", loads_LD=loads, layers=layers
            )
            for each, loads in zip(judged, (former_LD, loads_LD), strict=True)
        ]
        draw(pictures, heatmap)
        console.print(f"the heat map is in {heatmap}")


def _read(parameters: Mapping[str, Any], path: Path) -> tuple[Posed, EnginePlan]:
    """Reads the loads as a problem whose devices have the slots that the plan uses."""
    order = device_order(parameters)
    order.check(is_needed=False)
    cluster = order.read()
    model = model_order(parameters).facts()
    files = (*(parameters["trace"] or ()), *(parameters["load"] or ()))
    workloads, model = model.with_loads(
        read_workloads(files, parameters["windows"], parameters["num_experts"] or model.num_experts)
    )
    loads, tokens = workloads.loads, workloads.tokens
    known = model.plan_facts(None if cluster is None else len(cluster.entries), loads.num_experts)
    plan = only_layers(read_plan(path, known), loads.layers, path)
    num_devices = plan.placement.num_ranks
    plan.placement.check_fits(loads.layers, loads.num_experts, known.num_devices or num_devices)
    cluster = cluster or order.alike(num_devices)
    used_D = plan.copies_LED.sum(axis=1).max(axis=0)
    of_trace = None if tokens is None else tokens.expert_ids_NLK.shape[2]
    problem = PlacementProblem(
        loads=loads,
        devices=cluster.with_slots([max(1, int(used)) for used in used_D]),
        bytes_per_expert=model.bytes_per_expert,
        batch_size=parameters["batch_size"],
        top_k=parameters["top_k"] or of_trace or model.top_k,
        fill=False,
    )
    return Posed(problem=problem, workloads=workloads, model=model), plan


def _before(path: Path | None, posed: Posed) -> tuple[str, NDArray[np.int64]]:
    loads, num_devices = posed.problem.loads, len(posed.problem.devices)
    if path is not None:
        plan = posed.read_plan(path)
        plan.placement.check_fits(loads.layers, loads.num_experts, num_devices)
        return path.name, plan.copies_LED
    if num_devices > loads.num_experts:
        raise ConfigError(
            f"{num_devices} devices cannot hold equal runs of {loads.num_experts} experts: name "
            "the plan before with --before."
        )
    runs = contiguous(loads.layers, loads.num_experts, num_devices)
    return "equal runs", copies_of(runs, loads.layers)


def _devices(posed: Posed, plan: EnginePlan, loads_LD: NDArray[np.float64]) -> Table:
    """Returns the table of devices, over all layers; memory is shown only if the model is known."""
    weight, layers = posed.problem.bytes_per_expert, posed.problem.loads.layers
    names = ("device", "node", "copies", "load, mean", "load, most", "in layer")
    table = _table(*names, *(() if weight is None else ("memory",)))
    table.title = "devices: load over the mean of the layer"
    copies_LD = plan.copies_LED.sum(axis=1)
    for device, each in enumerate(posed.problem.devices.devices[:_NUM_SHOWN]):
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


def _layers(posed: Posed, plan: EnginePlan, loads_LD: NDArray[np.float64]) -> Table:
    table = _table("layer", "busiest device", "its load", "hottest expert", "share", "its devices")
    table.title = "layers, mean over scenarios"
    shares_LE = posed.problem.loads.shares_SLE().mean(axis=0)
    for row, layer in enumerate(posed.problem.loads.layers[:_NUM_SHOWN]):
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
