"""`moe-serve plan`: recommends a layout for a steady batch, or a fleet for a workload."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from moe_serve.cli.bench.load_options import LengthOptions, TraceOptions
from moe_serve.cli.console import wide_console
from moe_serve.cli.options import option, option_values, with_options
from moe_serve.cli.plan_fleet import FleetOptions, memory_bytes_of, print_fleet_plan
from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    from moe_serve.planning.calibration_file import Calibration
    from moe_serve.planning.layout_planner import PlannedLayout

_NUM_SHOWN = 12
BATCH = "A steady batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyOptions:
    """Options about a steady batch: a fixed number of sequences that decode all the time."""

    max_tpot_ms: float | None = option(
        None,
        help="Largest time per output token (TPOT), in milliseconds. Default: no limit.",
        rich_help_panel=BATCH,
    )
    batch: int | None = option(
        None,
        help="Number of sequences that generate tokens at the same time. Default: the largest "
        "number that the other options allow.",
        rich_help_panel=BATCH,
    )
    rate: float | None = option(
        None,
        help="Throughput that all devices together must reach, in output tokens per second "
        "(instead of --batch).",
        rich_help_panel=BATCH,
    )
    context: int = option(
        1024,
        help="Number of tokens of one sequence, prompt and answer together.",
        rich_help_panel=BATCH,
    )
    network: bool = option(
        False,
        "--network",
        help="Assume that the devices are on different hosts: use the calibrated network costs "
        "instead of the costs within one host.",
        rich_help_panel=BATCH,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `plan`."""

    calibration: Path | None = option(
        None, help="Calibration file written by `moe-serve calibrate`."
    )
    devices: int | None = option(
        None,
        help="Number of devices to plan for. All of them are assumed to be like the calibrated "
        "device.",
    )
    memory_bytes: str | None = option(
        None,
        metavar="BYTES",
        help="Memory of one device for weights and KV cache, in bytes or as a size such as 80GiB. "
        "Default: no limit.",
    )
    as_json: bool = option(False, "--json", help="Print the result as JSON, for scripts.")
    steady: SteadyOptions
    fleet: FleetOptions
    lengths: LengthOptions
    trace: TraceOptions


@with_options(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Compare layouts of a model on several devices and recommend one.

    For a workload (--trace or --request-rate): search layouts on the devices of --fleet, or on
    --devices like a calibrated one, simulate the best, and recommend the cheapest that keeps --slo.

    For a steady batch (--calibration and --devices): compare the whole model on one device,
    replicas, and attention and experts on separate devices. Give at least one of --batch, --rate,
    --max-tpot-ms and --memory-bytes.
    """
    fleet = options.fleet
    if fleet.fleet or fleet.request_rate is not None or options.trace.trace is not None:
        _refuse_steady(options.steady)
        print_fleet_plan(
            fleet,
            options.lengths,
            options.trace,
            calibration=options.calibration,
            devices=options.devices,
            memory=options.memory_bytes,
            as_json=options.as_json,
        )
    else:
        _plan_steady(options)


def _refuse_steady(steady: SteadyOptions) -> None:
    """Refuses options of a steady batch beside a workload."""
    given = option_values(steady)
    for name, usual in option_values(SteadyOptions()).items():
        if given[name] != usual:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for a steady batch, but --fleet, --trace and "
                "--request-rate describe a workload: its limits are in --slo."
            )


def _plan_steady(options: PlanOptions) -> None:
    from moe_serve.planning.calibration_file import read_calibration
    from moe_serve.planning.layout_planner import PlanRequest, plan_layouts
    from moe_serve.planning.plan_verdict import verdict

    steady = options.steady
    if options.calibration is None or options.devices is None:
        raise ConfigError(
            "give --calibration FILE and --devices N for a steady batch, or --fleet with --trace "
            "or --request-rate for a workload."
        )
    measured = read_calibration(options.calibration)
    if steady.network:
        costs = dataclasses.replace(measured.costs, link=measured.network)
        measured = dataclasses.replace(measured, costs=costs)
    request = PlanRequest(
        num_devices=options.devices,
        context=steady.context,
        batch=steady.batch,
        rate=steady.rate,
        max_tpot_s=None if steady.max_tpot_ms is None else steady.max_tpot_ms / 1e3,
        memory_bytes=memory_bytes_of(options.memory_bytes),
    )
    layouts = plan_layouts(measured, request)
    answer = verdict(layouts, request)
    if options.as_json:
        document: dict[str, Any] = {
            "request": dataclasses.asdict(request),
            "model": measured.model.name,
            "verdict": dataclasses.asdict(answer),
            "layouts": [_as_json(layout) for layout in layouts],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    simulated = _simulated(measured, layouts, steady.context)
    wide_console().print(_table(layouts), answer.sentence, *simulated, sep="\n")


def _simulated(
    measured: Calibration, layouts: Sequence[PlannedLayout], context: int
) -> Iterator[str]:
    """Yields the step time of the best split by the formula and by simulation, if there is a
    split."""
    from moe_serve.planning.layout_planner import simulated_step_s

    for split in layouts:
        if split.kind == "disaggregated" and not split.reason:
            seconds = simulated_step_s(measured, split, context)
            yield (
                f"{split.name}: {1e3 * split.step_s:.2f} ms by the formula, "
                f"{1e3 * seconds:.2f} ms by simulation"
            )
            return


def _as_json(layout: PlannedLayout) -> dict[str, Any]:
    return {
        "name": layout.name,
        **dataclasses.asdict(layout),
        "tokens_per_s_per_device": layout.tokens_per_s_per_device,
    }


def _table(layouts: list[PlannedLayout]) -> Table:
    """Returns the table of the best layouts; layouts with whole models are always included."""
    table = Table(box=None)
    for name in ("layout", "batch", "TPOT ms", "tokens/s", "per device", "GiB A", "GiB E", ""):
        is_number = name not in ("layout", "")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for index, layout in enumerate(layouts):
        if index >= _NUM_SHOWN and layout.kind == "disaggregated":
            continue
        figures = (
            str(layout.batch),
            f"{1e3 * layout.step_s:.2f}",
            f"{layout.tokens_per_s:.0f}",
            f"{layout.tokens_per_s_per_device:.0f}",
        )
        table.add_row(
            layout.name,
            *(figures if layout.batch else [""] * len(figures)),
            f"{layout.attention_bytes / 2**30:.2f}",
            f"{layout.expert_bytes / 2**30:.2f}" if layout.expert_bytes else "",
            layout.reason or ("" if layout.is_served else "for comparison: not served"),
        )
    return table
