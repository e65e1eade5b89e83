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
        help="Traces, of moe-serve or as `trace import` reads them. Each is a scenario.",
        rich_help_panel=_LOADS,
    ),
]
Loads = Annotated[
    list[Path] | None,
    typer.Option(
        "--load",
        metavar="FILE...",
        help="Tables of loads: SGLang, vLLM, TensorRT-LLM (a folder), CSV, or ours.",
        rich_help_panel=_LOADS,
    ),
]
Windows = Annotated[
    int,
    typer.Option(min=1, help="Cut each file into so many scenarios.", rich_help_panel=_LOADS),
]
NumExperts = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Experts of a layer.",
        show_default="as the file says, or the largest id plus 1",
        rich_help_panel=_LOADS,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Experts that a token chooses.",
        show_default="as the trace or the model says",
        rich_help_panel=_LOADS,
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(help="A checkpoint's folder, or its config.json.", rich_help_panel=_MODEL),
]
NumLayers = Annotated[
    int | None,
    typer.Option(
        min=1, help="Instead of a model: all its layers, dense ones too.", rich_help_panel=_MODEL
    ),
]
DenseLayers = Annotated[
    str | None,
    typer.Option(
        help="Instead of a model: those without routed experts, as 0-2,5.", rich_help_panel=_MODEL
    ),
]
BytesPerExpert = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Of one expert of one layer.",
        show_default="as the model says",
        rich_help_panel=_MODEL,
    ),
]
Cluster = Annotated[
    Path | None,
    typer.Option(help="YAML, see configs/placement/*.yaml.", rich_help_panel=_DEVICES),
]
NumDevices = Annotated[
    int | None,
    typer.Option(
        "--devices", min=1, max=2**14, help="Instead: devices, alike.", rich_help_panel=_DEVICES
    ),
]
NumNodes = Annotated[
    int | None,
    typer.Option("--nodes", min=1, help="They stand on so many nodes.", rich_help_panel=_DEVICES),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Slots of a layer beyond one for each expert.",
        show_default="0, or what the cluster's slots leave",
        rich_help_panel=_DEVICES,
    ),
]
Current = Annotated[
    Path | None,
    typer.Option(help="The plan in use, in any format.", rich_help_panel=_LIMITS),
]
MaxMoves = Annotated[
    int | None,
    typer.Option(
        min=0, help="Copies that a layer may get where they were not.", rich_help_panel=_LIMITS
    ),
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="[LAYER:]EXPERT@DEVICE",
        help="A copy that must be there. Repeatable.",
        rich_help_panel=_LIMITS,
    ),
]
Groups = Annotated[
    int | None,
    typer.Option(
        min=1, help="Groups of experts, as routers choose among.", rich_help_panel=_LIMITS
    ),
]
NodesPerGroup = Annotated[
    int,
    typer.Option(
        "--max-nodes-per-group", min=1, help="A group's copies lie on.", rich_help_panel=_LIMITS
    ),
]
Fill = Annotated[
    bool,
    typer.Option(help="Use every slot, as other engines want it.", rich_help_panel=_LIMITS),
]
BalanceBy = Annotated[
    Balance,
    typer.Option(help="Rows (prefill), or experts that a step activates (decode)."),
]
BatchSize = Annotated[int, typer.Option(min=1, max=2**20, help="Tokens of a step.")]
Seconds = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="The solver ends after them, with the best so far.",
        show_default="120, fan-out 600; most plans take far less",
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all figures here.")]
