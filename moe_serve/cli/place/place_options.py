"""The flags that the commands of `moe-serve place` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Solver = Literal["search", "ilp", "linear", "round-robin", "eplb", "eplb-hierarchical"]
Balance = Literal["tokens", "activated"]
Objective = Literal["balance", "fan-out"]

_LOADS, _MODEL, _DEVICES, _LIMITS = "Loads", "Model", "Devices", "What a plan must keep"

Traces = Annotated[
    list[Path] | None,
    typer.Option(
        "--trace",
        metavar="FILE...",
        help="Routing traces, of moe-serve or in a format that `moe-serve trace import` "
        "reads. Each file is one scenario. Several files may follow one flag.",
        rich_help_panel=_LOADS,
    ),
]
Loads = Annotated[
    list[Path] | None,
    typer.Option(
        "--load",
        metavar="FILE...",
        help="Tables of expert loads, from moe-serve, SGLang, vLLM, TensorRT-LLM (a "
        "folder) or CSV. Each file is one scenario. Several files may follow one "
        "flag.",
        rich_help_panel=_LOADS,
    ),
]
Windows = Annotated[
    int,
    typer.Option(
        min=1,
        help="Split each file into this many scenarios of equal length.",
        rich_help_panel=_LOADS,
    ),
]
NumExperts = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of experts in a layer.",
        show_default="as the file says, or the largest id plus 1",
        rich_help_panel=_LOADS,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of experts that a token chooses in a layer.",
        show_default="as the trace or the model says",
        rich_help_panel=_LOADS,
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a checkpoint, or its config.json: gives layers, experts and bytes "
        "per expert.",
        rich_help_panel=_MODEL,
    ),
]
NumLayers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of layers of the model, dense ones included (instead of --model).",
        rich_help_panel=_MODEL,
    ),
]
DenseLayers = Annotated[
    str | None,
    typer.Option(
        help="Numbers of the layers without routed experts, such as 0-2,5 (instead of --model).",
        rich_help_panel=_MODEL,
    ),
]
BytesPerExpert = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Bytes of one expert in one layer, for memory and moves.",
        show_default="as the model says",
        rich_help_panel=_MODEL,
    ),
]
Cluster = Annotated[
    Path | None,
    typer.Option(
        help="YAML file with the devices, their slots, memory and nodes; examples are in "
        "configs/placement. A cluster file of `moe-serve launch` works too.",
        rich_help_panel=_DEVICES,
    ),
]
NumDevices = Annotated[
    int | None,
    typer.Option(
        "--devices",
        min=1,
        max=2**14,
        help="Number of identical devices (instead of --cluster).",
        rich_help_panel=_DEVICES,
    ),
]
NumNodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        min=1,
        help="Number of nodes that --devices are spread over evenly. Default: 1.",
        rich_help_panel=_DEVICES,
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Number of replicas in a layer: expert slots of all devices beyond one slot "
        "per expert.",
        show_default="0, or what the cluster's slots leave",
        rich_help_panel=_DEVICES,
    ),
]
Current = Annotated[
    Path | None,
    typer.Option(
        help="Plan that is in use now, in any known format. It is the start that "
        "--max-moves counts from.",
        rich_help_panel=_LIMITS,
    ),
]
MaxMoves = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Largest number of expert copies in a layer that may be placed where "
        "--current has none. Default: no limit.",
        rich_help_panel=_LIMITS,
    ),
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="[LAYER:]EXPERT@DEVICE",
        help="Copy that the plan must contain: this expert on this device, in one layer or"
        " in all. May be given more than once.",
        rich_help_panel=_LIMITS,
    ),
]
Groups = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of groups of consecutive experts, of which the router chooses some. "
        "Default: groups do not limit the plan.",
        rich_help_panel=_LIMITS,
    ),
]
NodesPerGroup = Annotated[
    int,
    typer.Option(
        "--max-nodes-per-group",
        min=1,
        help="Largest number of nodes that may hold copies of one group of --groups.",
        rich_help_panel=_LIMITS,
    ),
]
Fill = Annotated[
    bool,
    typer.Option(
        help="Fill every slot with a copy, as other engines require. With --no-fill slots "
        "may stay empty.",
        rich_help_panel=_LIMITS,
    ),
]
BalanceBy = Annotated[
    Balance,
    typer.Option(
        help="Load to make even: tokens (rows computed, for prefill) or activated "
        "(distinct experts that a step reads, for decode)."
    ),
]
BatchSize = Annotated[
    int,
    typer.Option(
        min=1,
        max=2**20,
        help="Number of tokens in one step, for the steps that are simulated and for "
        "--balance activated.",
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Time limit of the solver in seconds; the best plan found so far is used.",
        show_default="120, or 600 for --objective fan-out; most plans take far less",
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="JSON file for all figures.")]
