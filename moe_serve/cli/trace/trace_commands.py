"""`moe-serve trace`: its group of commands, the control of a running server's recordings, and the
import of other programs' recordings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_serve.cli.console import counted, wide_console
from moe_serve.cli.server_client import URL, AdminClient, AdminKey, Url
from moe_serve.cli.trace.trace_record import record
from moe_serve.cli.trace.trace_show import show
from moe_serve.errors import InvalidRequestError, TracingError

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
    from routing_predictor.traces.load_file import RecordedLoad, write_load
    from routing_predictor.traces.trace_file import write_trace

    options = ImportOptions(
        num_experts=num_experts, num_layers=num_layers, top_k=top_k, model=model
    )
    imported = import_files(files, kind, options)
    if isinstance(imported, RecordedLoad):
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


_FIELDS = frozenset({"is_recording", "folder", "sample_rate", "recording", "total"})

trace = typer.Typer(no_args_is_help=True)
trace.command()(record)
trace.command()(show)
trace.command(name="import")(import_)


@trace.command()
def start(
    url: Url = URL,
    admin_key: AdminKey = None,
    sample_rate: Annotated[
        float | None,
        typer.Option(
            help="Share of the requests to record, above 0 and at most 1.",
            show_default="the server's trace.sample_rate",
        ),
    ] = None,
    weights: Annotated[
        bool | None,
        typer.Option(
            help="Also record the weights that the routers give to the chosen experts.",
            show_default="the server's trace.weights",
        ),
    ] = None,
) -> None:
    """Start recording which experts the routers of a running server choose.

    The server writes the recording into a new folder inside the folder that its configuration key
    trace.directory names.
    """
    if sample_rate is not None and not 0 < sample_rate <= 1:
        raise TracingError(f"--sample-rate must be above 0 and at most 1, got {sample_rate:g}.")
    given = {"sample_rate": sample_rate, "weights": weights}
    body = {name: value for name, value in given.items() if value is not None}
    _print(_ask(url, admin_key, "POST", "start", body))


@trace.command()
def stop(url: Url = URL, admin_key: AdminKey = None) -> None:
    """Stop the recording and write the tokens that are still in memory to disk."""
    _print(_ask(url, admin_key, "POST", "stop"))


@trace.command()
def status(url: Url = URL, admin_key: AdminKey = None) -> None:
    """Show whether a recording is running, and how large it is."""
    _print(_ask(url, admin_key, "GET", "status"))


def _ask(
    url: str, key: str | None, method: str, verb: str, body: Mapping[str, object] | None = None
) -> Mapping[str, Any]:
    client = AdminClient(url=url, key=key, error=TracingError)
    return client.ask(method, f"trace/{verb}", _FIELDS, body)


def _print(status: Mapping[str, Any]) -> None:
    recording, total = status["recording"], status["total"]
    table = Table.grid(padding=(0, 2))
    table.add_row("recording", "yes" if status["is_recording"] else "no")
    if status["folder"] is not None:
        kept = [word for word in ("weights", "tokens") if status[f"has_{word}"]]
        table.add_row("folder", status["folder"])
        table.add_row("of", f"{100 * status['sample_rate']:.4g}% of the requests")
        table.add_row("with", " and ".join(["expert ids", *kept]))
        table.add_row("tokens", f"{recording['num_tokens']} (in all {total['num_tokens']})")
        table.add_row("written", f"{recording['num_written_bytes'] / 2**20:.3g} MiB")
        dropped = recording["num_dropped_parts"]
        table.add_row("files", f"{recording['num_parts']}, {dropped} older ones were dropped")
    if recording["num_lost_tokens"]:
        table.add_row("lost", f"{recording['num_lost_tokens']} tokens that the disk did not take")
    if recording["failure"]:
        table.add_row("failed", recording["failure"])
    wide_console().print(table)
