"""`moe-serve trace import`: converts recordings of other programs into a trace or a table of
loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_serve.cli.console import counted
from moe_serve.errors import InvalidRequestError

_FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        help="Recording of another program: a file, a folder, or the files of all ranks."
    ),
]
_KindOption = Annotated[
    str,
    typer.Option(
        "--from",
        help="Format of the recording: auto (by name and content), sglang, vllm, trtllm, "
        "npz, npy, csv or jsonl.",
    ),
]
_NumExpertsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Number of experts in a layer.", show_default="the largest id plus 1"),
]
_NumLayersOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of layers. Required for SGLang's HTTP answers, which do not contain it."
    ),
]
_TopKOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of experts that a token chooses. Required for SGLang's HTTP answers, which "
        "do not contain it.",
    ),
]
_ModelOption = Annotated[
    str, typer.Option(help="Model name to store in the file. Default: no name.")
]


def import_(
    files: _FilesArgument,
    out: Annotated[Path, typer.Option(help="File *.safetensors to write; it must not exist yet.")],
    kind: _KindOption = "auto",
    num_experts: _NumExpertsOption = None,
    num_layers: _NumLayersOption = None,
    top_k: _TopKOption = None,
    model: _ModelOption = "",
) -> None:
    """Convert a routing recording of another program into a trace or a table of expert loads.

    Recordings are read as plain data. Nothing in them is executed, and files that contain anything
    but data are refused.
    """
    if out.exists():
        raise InvalidRequestError(f"{out} already exists: choose another --out.", param="out")

    from routing_predictor.importers.importer import import_files
    from routing_predictor.importers.tables import ImportOptions
    from routing_predictor.traces.load_file import ExpertLoad, write_load
    from routing_predictor.traces.trace_file import write_trace

    options = ImportOptions(
        num_experts=num_experts, num_layers=num_layers, top_k=top_k, model=model
    )
    imported = import_files(files, kind, options)
    if isinstance(imported, ExpertLoad):
        size = write_load(imported, out)
        steps, num_layers_read, experts = imported.counts_SLE.shape
        what = (
            f"loads of {counted(steps, 'step')}, {counted(num_layers_read, 'layer')}, "
            f"{counted(experts, 'expert')}"
        )
    else:
        size = write_trace(imported, out)
        what = (
            f"a trace of {counted(imported.num_tokens, 'token')}, "
            f"{counted(len(imported.request_ids), 'request')}, "
            f"{counted(len(imported.layers), 'layer')}, "
            f"top-{imported.top_k} of {imported.num_experts}"
        )
    typer.echo(f"{what}: {out}, {size / 2**20:.1f} MiB")
