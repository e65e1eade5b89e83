"""`moe-serve simulate`: predicts how a cluster would serve a workload, without the cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moe_serve.cli.bench.load_options import LOAD, RESULTS, LoadOptions, ReportOptions
from moe_serve.cli.options import option, with_options
from moe_serve.config.keys import parse_size
from moe_serve.errors import BenchError, ConfigError

if TYPE_CHECKING:
    from moe_serve.bench.workload.workload import Workload
    from moe_serve.simulate.layout import Layout
    from moe_serve.simulate.simulation import CellSettings, CostedModel

CLUSTER, LIMITS = "Cluster", "Limits of each engine"


class PrecisionChoice(str, Enum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"


class PolicyChoice(str, Enum):
    FIFO = "fifo"
    BALANCED = "balanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCluster:
    """Options about the simulated devices."""

    model: str | None = option(
        None,
        help="Model: a folder with a config.json, a config.json, or a name from configs/models "
        "such as qwen3-235b. No weights are needed.",
        rich_help_panel=CLUSTER,
    )
    device: str | None = option(
        None,
        help="Device: a YAML file, or a name from configs/devices such as h100.",
        rich_help_panel=CLUSTER,
    )
    calibration: Path | None = option(
        None,
        metavar="FILE",
        help="Calibration of this machine by `moe-serve calibrate`, in place of --model and "
        "--device.",
        rich_help_panel=CLUSTER,
    )
    devices: int = option(1, help="Number of devices.", rich_help_panel=CLUSTER)
    layout: str = option(
        "colocated",
        metavar="colocated|replicas|2A4E",
        help="colocated: attention on every device, experts spread over the same devices; "
        "replicas: a whole model on each; 2A4E: 2 attention ranks and 4 expert ranks. 4x2A4E and "
        "4xcolocated are 4 independent cells.",
        rich_help_panel=CLUSTER,
    )
    tensor_shards: int = option(
        1, help="Number of devices of each attention rank.", rich_help_panel=CLUSTER
    )
    precision: PrecisionChoice = option(
        PrecisionChoice.AUTO,
        help="Weights of the layers: bfloat16 or fp8. auto: as the model's config says.",
        rich_help_panel=CLUSTER,
    )
    routing: Path | None = option(
        None,
        metavar="FILE",
        help="Trace of the routers' choices or file of expert loads, for the number of experts "
        "that a batch activates. Default: equally popular experts.",
        rich_help_panel=CLUSTER,
    )
    scatter: bool = option(
        True,
        help="Let the times of steps vary as those of the calibration did, in layouts of one "
        "device per cell.",
        rich_help_panel=CLUSTER,
    )
    memory_bytes: str | None = option(
        None,
        metavar="BYTES",
        show_default="the device's; with --calibration no limit",
        help="Memory of one device, in bytes or as a size such as 80GiB.",
        rich_help_panel=CLUSTER,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options about the engines, named as the server's."""

    max_num_seqs: int = option(
        256,
        min=1,
        help="Largest number of requests that one attention rank runs at once.",
        rich_help_panel=LIMITS,
    )
    max_batched_tokens: int = option(
        8192,
        min=1,
        help="Largest number of tokens that one attention rank computes in a step.",
        rich_help_panel=LIMITS,
    )
    max_model_len: int | None = option(
        None,
        min=2,
        show_default="the longest request",
        help="Largest number of tokens of a request, prompt and answer together.",
        rich_help_panel=LIMITS,
    )
    num_pages: int | None = option(
        None,
        min=1,
        show_default="what the memory holds",
        help="Number of KV pages of one attention rank.",
        rich_help_panel=LIMITS,
    )
    page_size: int = option(
        16, min=1, max=4096, help="Number of tokens in a KV page.", rich_help_panel=LIMITS
    )
    prefix_cache: bool = option(
        True, help="Share the KV pages of common beginnings.", rich_help_panel=LIMITS
    )
    batch_policy: PolicyChoice = option(
        PolicyChoice.FIFO, help="Batch policy of the scheduler.", rich_help_panel=LIMITS
    )
    micro_batches: int | None = option(
        None,
        min=1,
        max=4,
        show_default="chosen in each step",
        help="Number of micro-batches of a step with several ranks.",
        rich_help_panel=LIMITS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of `simulate`."""

    cluster: SimulatedCluster
    engine: EngineOptions
    load: LoadOptions
    report: ReportOptions
    timeline: Path | None = option(
        None,
        metavar="FILE",
        help="JSON file for the steps of all cells and the requests over simulated time, for "
        "chrome://tracing or Perfetto.",
        rich_help_panel=RESULTS,
    )
    seed: int = option(
        0,
        min=0,
        max=2**31 - 1,
        help="Seed of the random numbers. The same seed gives the same report.",
        rich_help_panel=LOAD,
    )


@with_options(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Predict how a cluster would serve a workload: latency, throughput and goodput.

    The server's own engines and schedulers run on a virtual clock; a cost model gives the time of
    each step. Give --model and --device for published hardware, or --calibration for this machine.
    """
    from moe_serve.bench.figures.summary import Slo
    from moe_serve.bench.report.report_table import print_report
    from moe_serve.bench.simulated_run import SimulatedRun, run_simulation
    from moe_serve.cli.console import wide_console
    from moe_serve.simulate.layout import Layout
    from moe_serve.simulate.simulated_timeline import SimulatedTimeline

    out = options.report
    if out.save_requests and out.json is None:
        raise BenchError("--save-requests takes --json FILE, into which they go.")
    for path in (out.json, options.timeline):
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"cannot write {path}: its folder does not exist.")
    cluster = options.cluster
    layout = Layout.parse(cluster.layout, cluster.devices, cluster.tensor_shards)
    model, workload = _costed(cluster, layout), _workload(options)
    run = SimulatedRun(
        model=model,
        settings=_settings(options, layout, workload, model.size.max_context),
        workload=workload,
        slo=None if out.slo is None else Slo.parse(out.slo),
        timeline=None if options.timeline is None else SimulatedTimeline(),
    )
    report = run_simulation(run)
    print_report(wide_console(), report)
    if options.timeline is not None and run.timeline is not None:
        run.timeline.write(options.timeline)
        typer.echo(f"timeline: {options.timeline}")
    if out.json is not None:
        report.write(out.json, has_records=out.save_requests)
        typer.echo(f"report: {out.json}")


def _costed(cluster: SimulatedCluster, layout: Layout) -> CostedModel:
    from moe_serve.planning.calibration_file import read_calibration
    from moe_serve.simulate.catalogue import find_device, find_model
    from moe_serve.simulate.costs.device import read_device
    from moe_serve.simulate.costs.model_shape import read_model_shape
    from moe_serve.simulate.simulation import calibrated, on_device

    if cluster.calibration is not None:
        if (cluster.model, cluster.device, cluster.routing) != (None, None, None):
            raise ConfigError(
                "--calibration has the model, its experts and this machine: leave out --model, "
                "--device and --routing."
            )
        return calibrated(read_calibration(cluster.calibration), layout)
    if cluster.model is None or cluster.device is None:
        raise ConfigError("give --model and --device, or --calibration.")
    shape = read_model_shape(find_model(cluster.model), cluster.precision.value)
    device = read_device(find_device(cluster.device))
    return on_device(shape, device, layout, cluster.routing)


def _settings(
    options: SimulateOptions, layout: Layout, workload: Workload, max_context: int
) -> CellSettings:
    from moe_serve.config.sections import SchedulerConfig
    from moe_serve.simulate.simulation import CellSettings

    engine, text = options.engine, options.cluster.memory_bytes
    memory = None if text is None else int(text) if text.isdecimal() else parse_size(text)
    if text is not None and not memory:
        raise ConfigError(
            f"memory-bytes cannot be {text!r}: it takes a number of bytes, or a size such as 80GiB."
        )
    longest = max((s.prompt_tokens + s.output_tokens for s in workload.slots()), default=2)
    return CellSettings(
        layout=layout,
        scheduler=SchedulerConfig(
            max_num_seqs=engine.max_num_seqs,
            max_batched_tokens=engine.max_batched_tokens,
            batch_policy=engine.batch_policy.value,
        ),
        page_size=engine.page_size,
        max_model_len=engine.max_model_len or min(longest, max_context),
        memory_bytes=memory,
        num_pages=engine.num_pages,
        has_prefix_cache=engine.prefix_cache,
        micro_batches=engine.micro_batches,
        has_scatter=options.cluster.scatter,
    )


def _workload(options: SimulateOptions) -> Workload:
    """Read the load. Without arrivals and a trace, all requests arrive at once."""
    from moe_serve.cli.bench.bench_plan import check_load, workload_of

    check_load(options.load)
    arrivals, trace = options.load.arrivals, options.load.trace.trace
    if arrivals.duration is not None and (
        arrivals.concurrency is not None or (arrivals.rate, trace) == (None, None)
    ):
        raise BenchError("--duration belongs to --rate or --trace: else give --requests.")
    workload = workload_of(options.load, options.seed)
    if workload.is_open and workload.arrivals is None and workload.trace is None:
        return replace(workload, concurrency=workload.num_requests)
    return workload
