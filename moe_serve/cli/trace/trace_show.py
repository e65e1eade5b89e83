"""`moe-serve trace show`: shows a trace or a table of loads as tables and a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from moe_serve.cli.console import check_output, wide_console
from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    from routing_predictor.traces.trace import RoutingTrace
    from routing_predictor.traces.trace_stats import Activation, Drift, LayerDistribution, Loads


_FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        help="Trace files, folders of recordings, or one file written by `moe-serve trace import`."
    ),
]
_JsonFileOption = Annotated[Path | None, typer.Option("--json", help="JSON file for all figures.")]
_HeatmapOption = Annotated[
    Path | None,
    typer.Option(help="PNG file for a heat map of the load of each expert in each layer."),
]
_NumRanksOption = Annotated[
    int,
    typer.Option(
        "--ranks",
        min=1,
        help="Number of expert ranks to compute the balance for; each rank holds an equal "
        "number of consecutive experts.",
    ),
]
_NumWindowsOption = Annotated[
    int,
    typer.Option(
        "--windows",
        min=1,
        max=1000,
        help="Number of windows of equal length that the recording is split into, to measure "
        "how loads change from one window to the next.",
    ),
]


def show(
    files: _FilesArgument,
    json_file: _JsonFileOption = None,
    heatmap: _HeatmapOption = None,
    num_ranks: _NumRanksOption = 4,
    num_windows: _NumWindowsOption = 8,
) -> None:
    """Show the load of each expert, how many experts a batch activates, and how loads change over
    time.
    """
    from routing_predictor.traces.trace_stats import draw_heat_map, drifts, layer_loads

    check_output(json_file, heatmap)
    if heatmap is not None and heatmap.suffix != ".png":
        raise ConfigError(f"--heatmap must be a file *.png, got {heatmap}.")
    shown = _read(files, num_windows)
    total = shown.load_WLE.sum(axis=0)
    if num_ranks > total.shape[1]:
        raise ConfigError(
            f"--ranks must be at most {total.shape[1]}, the number of experts in a layer; got "
            f"{num_ranks}."
        )
    facts = {**shown.facts, "layers": len(shown.layers), "experts": total.shape[1]}
    loads = layer_loads(total, shown.layers, num_ranks)
    drift = drifts(shown.load_WLE, shown.chance_WLE)
    console = wide_console()
    console.print(_facts(facts), _loads(loads, num_ranks))
    if shown.active:
        console.print(_activations(shown.active))
    if len(drift) > 1:
        console.print(_drifts(drift))
    if json_file is not None:
        figures = {
            "facts": facts,
            "ranks": num_ranks,
            "layers": [asdict(each) for each in loads],
            "activated_experts": [asdict(each) for each in shown.active],
            "drift": [asdict(each) for each in drift],
        }
        _write(json_file, json.dumps(figures, indent=1) + "\n")
    if heatmap is not None:
        name = shown.facts["model"] or files[0].name
        title = f"{name}: {total.sum() / len(shown.layers):.0f} choices per layer"
        draw_heat_map(total, shown.layers, title, heatmap)
        typer.echo(f"the heat map is in {heatmap}")


@dataclass(frozen=True, slots=True)
class _Shown:
    """The content of the files: loads of W windows, also of a shuffled trace, and values that only
    traces have."""

    facts: dict[str, Any]
    layers: tuple[int, ...]
    load_WLE: Loads
    chance_WLE: Loads | None
    active: list[Activation]


def _read(files: list[Path], num_windows: int) -> _Shown:
    from routing_predictor.traces.load_file import FORMAT, read_load
    from routing_predictor.traces.metadata import read_metadata
    from routing_predictor.traces.trace_file import read_traces
    from routing_predictor.traces.trace_stats import activations, shuffled, windows

    if len(files) == 1 and files[0].is_file() and read_metadata(files[0]).get("format") == FORMAT:
        load = read_load(files[0])
        facts = {"model": load.model, "source": load.source, "steps": len(load.counts_SLE)}
        return _Shown(facts, load.layers, _merged(load.counts_SLE, num_windows), None, [])
    trace = read_traces(files)
    if not trace.num_tokens:
        raise ConfigError(f"{files[0]} has no tokens: there is nothing to show.")
    by_window, chance = windows(trace, num_windows), windows(shuffled(trace), num_windows)
    return _Shown(_trace_facts(trace), trace.layers, by_window, chance, activations(trace))


def _trace_facts(trace: RoutingTrace) -> dict[str, Any]:
    from routing_predictor.traces.trace import DECODE

    num_decode = int((trace.phase_N == DECODE).sum())
    more = [
        word
        for word, column in (("token ids", trace.token_N), ("weights", trace.weights_NLK))
        if column is not None
    ]
    return {
        "model": trace.model,
        "identity": trace.model_identity[:16],
        "tokens": trace.num_tokens,
        "of prompts": trace.num_tokens - num_decode,
        "generated": num_decode,
        "requests": len(trace.request_ids),
        "labels": sorted(set(trace.labels)),
        "adapters": sorted(set(trace.adapters) - {""}),
        "top_k": trace.top_k,
        "with": more,
    }


def _merged(by_step: Loads, count: int) -> Loads:
    """Adds steps up to equal windows, of which there are no more than steps."""
    import numpy as np

    count = min(count, len(by_step))
    return np.stack([part.sum(axis=0) for part in np.array_split(by_step, count)])


def _facts(facts: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if value not in ("", []):
            listed = isinstance(value, list)
            is_long = listed and len(value) > 8
            shown = f"{len(value)} different" if is_long else ", ".join(value) if listed else value
            table.add_row(name, str(shown))
    return table


def _loads(loads: list[LayerDistribution], num_ranks: int) -> Table:
    table = _table("layer", "hottest", "share", "max / mean", "unused")
    table.add_column("balancedness", justify="right", no_wrap=True)
    table.title = (
        f"load of the experts; balancedness on {num_ranks} ranks that hold equal runs of experts"
    )
    for each in loads:
        table.add_row(
            str(each.layer),
            " ".join(map(str, each.hottest)),
            " ".join(f"{share:.1%}" for share in each.shares),
            f"{each.hottest_over_mean:.2f}",
            str(each.num_unused),
            f"{each.balancedness:.3f}",
        )
    return table


def _activations(active: list[Activation]) -> Table:
    table = _table("batch", "if alike", "any tokens", "one a request", "of one request")
    table.title = "experts of a layer that a batch activates, mean over layers"
    for each in active:
        table.add_row(
            str(each.batch_size),
            f"{each.even:.1f}",
            f"{each.any_tokens:.1f}",
            *("" if v is None else f"{v:.1f}" for v in (each.one_per_request, each.one_request)),
        )
    return table


def _drifts(drift: list[Drift]) -> Table:
    table = _table("window", "choices", "from last", "worst layer", "from all", "chance")
    table.title = "drift, as total variation of the loads (mean over layers)"
    for each in drift:
        values = (each.to_previous, each.to_previous_worst, each.to_all, each.by_chance)
        table.add_row(
            str(each.window),
            f"{each.num_choices:.0f}",
            *("" if value is None else f"{value:.3f}" for value in values),
        )
    return table


def _table(*names: str) -> Table:
    table = Table()
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None
