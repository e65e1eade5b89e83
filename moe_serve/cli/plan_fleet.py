"""The part of `moe-serve plan` that searches a fleet for a workload."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from moe_serve.cli.bench.load_options import (
    ArrivalOptions,
    LengthOptions,
    LoadOptions,
    TraceOptions,
)
from moe_serve.cli.console import interrupted_by_terminate, wide_console
from moe_serve.cli.options import option
from moe_serve.config.keys import parse_size
from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    from moe_serve.fleet.demand import Demand
    from moe_serve.fleet.fleet_plan import FleetPlan
    from moe_serve.fleet.offer import Offer

FLEET = "A workload on a fleet"
_DEFAULT_REQUESTS = 500
_DEFAULT_SLO = "ttft=2s,tpot=50ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Options about the available devices and the limits to keep."""

    fleet: str | None = option(
        None,
        metavar="TYPE:N@PRICE,...",
        help=(
            "Available devices, as TYPE:NUMBER@PRICE: a type from configs/devices or a YAML file, "
            "the number of devices, and the price of one device for an hour, such as "
            "h100:64@2.50,h20:32@0.90. Needs --model."
        ),
        rich_help_panel=FLEET,
    )
    model: str | None = option(
        None,
        help="Model: a folder with a config.json, a config.json, or a name from configs/models "
        "such as qwen3-235b. No weights are needed.",
        rich_help_panel=FLEET,
    )
    precision: str = option(
        "auto",
        metavar="auto|bfloat16|fp8",
        help="Weights of the layers: bfloat16 or fp8. auto: as the model's config says.",
        rich_help_panel=FLEET,
    )
    routing: Path | None = option(
        None,
        metavar="FILE",
        help=(
            "Trace of the routers' choices or file of expert loads. It gives the number of "
            "experts that a batch activates. Default: all experts are equally popular."
        ),
        rich_help_panel=FLEET,
    )
    slo: str = option(
        _DEFAULT_SLO,
        metavar="ttft=2s,tpot=50ms,e2e=5s",
        help="Latency limits, in ms or s.",
        rich_help_panel=FLEET,
    )
    attainment: float = option(
        0.95, help="Share of the requests that must meet the limits.", rich_help_panel=FLEET
    )
    request_rate: float | None = option(
        None,
        min=0.0001,
        show_default="the trace's own",
        help="Requests per second. A trace is replayed faster or slower; without a trace, arrivals "
        "are random (Poisson).",
        rich_help_panel=FLEET,
    )
    requests: int | None = option(
        None,
        min=2,
        show_default=str(_DEFAULT_REQUESTS),
        help="Number of requests to simulate: the first ones of a trace.",
        rich_help_panel=FLEET,
    )
    certify: int = option(
        10,
        min=1,
        max=100,
        help=("Number of candidate fleets to check by simulation."),
        rich_help_panel=FLEET,
    )
    processes: int | None = option(
        None,
        min=1,
        max=256,
        show_default="as many as cores",
        help="Number of processes that search and simulate. The plan is the same with any number.",
        rich_help_panel=FLEET,
    )
    seed: int = option(
        0,
        min=0,
        max=2**31 - 1,
        help="Seed of the random numbers. The same seed gives the same plan.",
        rich_help_panel=FLEET,
    )
    html: Path | None = option(
        None,
        metavar="FILE",
        help="HTML file for a page with the frontier of cost against latency.",
        rich_help_panel=FLEET,
    )


def memory_bytes_of(text: str | None) -> int | None:
    """Parses --memory-bytes. Raises ConfigError."""
    if text is None:
        return None
    number = int(text) if text.isascii() and text.isdigit() else parse_size(text)
    if number is None:
        raise ConfigError(
            f"memory-bytes cannot be {text!r}: it takes a number of bytes, or a size such as 80GiB."
        )
    return number


def print_fleet_plan(
    options: FleetOptions,
    lengths: LengthOptions,
    trace: TraceOptions,
    *,
    calibration: Path | None,
    devices: int | None,
    memory: str | None,
    as_json: bool,
) -> None:
    """Searches, prints the table and the verdict, and writes the page."""
    from moe_serve.fleet.fleet_page import write_plan_page
    from moe_serve.fleet.fleet_plan import plan_fleet
    from moe_serve.fleet.fleet_table import plan_document
    from moe_serve.fleet.fleet_verdict import fleet_verdict

    if options.html is not None and not options.html.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {options.html}: its folder does not exist.")
    offers = _offers(options, calibration, devices, memory)
    demand = _demand(options, lengths, trace)
    with interrupted_by_terminate():
        found = plan_fleet(
            offers,
            demand,
            options.certify,
            lambda text: typer.echo(f"{text} ...", err=True),
            options.processes,
        )
    verdict, model = fleet_verdict(found), offers[0].size.name
    if as_json:
        typer.echo(json.dumps(plan_document(found, verdict, model), indent=2))
    else:
        wide_console().print(_table(found), *verdict.sentences, sep="\n")
    if options.html is not None:
        write_plan_page(options.html, found, verdict, model)
        typer.echo(f"page: {options.html}", err=True)


def _offers(
    options: FleetOptions, calibration: Path | None, devices: int | None, memory: str | None
) -> Sequence[Offer]:
    from moe_serve.fleet.offer import calibrated_offer, read_fleet
    from moe_serve.planning.calibration_file import read_calibration
    from moe_serve.simulate.catalogue import find_model
    from moe_serve.simulate.costs.model_shape import read_model_shape

    if calibration is not None:
        if options.fleet is not None or options.model is not None or options.routing is not None:
            raise ConfigError(
                "--calibration already describes the model, its experts and this machine: leave "
                "out --fleet, --model and --routing."
            )
        if devices is None:
            raise ConfigError("--calibration takes --devices N, the number of devices like it.")
        return [calibrated_offer(read_calibration(calibration), devices, memory_bytes_of(memory))]
    if options.fleet is None or options.model is None:
        raise ConfigError("give --fleet and --model, or --calibration and --devices.")
    if devices is not None or memory is not None:
        raise ConfigError(
            "--devices and --memory-bytes only apply to --calibration: leave them out, because "
            "--fleet states both."
        )
    if options.precision not in ("auto", "bfloat16", "fp8"):
        raise ConfigError(
            f"precision must be one of auto, bfloat16, fp8; got {options.precision!r}."
        )
    shape = read_model_shape(find_model(options.model), options.precision)  # type: ignore[arg-type]
    return read_fleet(options.fleet, shape, options.routing)


def _demand(options: FleetOptions, lengths: LengthOptions, trace: TraceOptions) -> Demand:
    from moe_serve.bench.figures.summary import Slo
    from moe_serve.cli.bench.bench_plan import check_load, workload_of
    from moe_serve.fleet.demand import demand_of

    rate = options.request_rate
    if rate is None and trace.trace is None:
        raise ConfigError("give the load: --trace FILE, or --request-rate R.")
    if rate is not None and not math.isfinite(rate):
        raise ConfigError(f"--request-rate must be a finite number, got {rate}.")
    arrivals = ArrivalOptions(
        rate=rate if trace.trace is None else None,
        requests=options.requests or _DEFAULT_REQUESTS,
    )
    load = LoadOptions(arrivals=arrivals, lengths=lengths, trace=trace)
    check_load(load)
    slots = list(workload_of(load, options.seed).slots())
    if any(slot.prompt is not None for slot in slots):
        raise ConfigError(
            "the trace has texts instead of token counts, which a plan needs: give a trace with "
            "lengths."
        )
    if rate is not None and trace.trace is not None and slots[-1].at_s > 0:
        scale = (len(slots) / slots[-1].at_s) / rate
        slots = [replace(slot, at_s=slot.at_s * scale) for slot in slots]
    slo = Slo.parse(options.slo)
    return demand_of(slots, options.seed, slo, options.attainment, shares_prefixes=True)


def _table(found: FleetPlan) -> Table:
    from moe_serve.fleet.fleet_table import COLUMNS, cells_of_row

    table = Table(box=None)
    for number, name in enumerate(COLUMNS):
        is_text = number in (0, len(COLUMNS) - 1)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for each in found.certified:
        table.add_row(*cells_of_row(each))
    if found.one_device is not None:
        table.add_row(*cells_of_row(found.one_device))
    return table
