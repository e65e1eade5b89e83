"""`moe-serve simulate`: predicts how a cluster would serve a workload, without the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moe_serve.cli.bench.bench_options import (
    LOAD,
    PROMPTS,
    RESULTS,
    ArrivalOptions,
    PromptOptions,
    TraceOptions,
)
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
class SimulatedLoad:
    """Options about the requests, named as those of `bench`."""

    concurrency: int | None = option(
        None,
        min=1,
        max=1_000_000,
        help="Closed loop: keep this many requests in progress.",
        rich_help_panel=LOAD,
    )
    rate: float | None = option(
        None, min=0.0001, help="Open loop: requests per second.", rich_help_panel=LOAD
    )
    burstiness: float = option(
        1.0,
        min=0.0,
        max=1000.0,
        help="Variation of the times between the requests of --rate: 0 is equal times, 1 is "
        "Poisson arrivals, larger values send bursts.",
        rich_help_panel=LOAD,
    )
    requests: int | None = option(
        None,
        min=1,
        show_default="100, or the whole trace",
        help="Number of requests. Without --concurrency, --rate and --trace, all arrive at once.",
        rich_help_panel=LOAD,
    )
    seed: int = option(
        0,
        min=0,
        max=2**31 - 1,
        help="Seed of the random numbers. The same seed gives the same report.",
        rich_help_panel=LOAD,
    )
    prompt_tokens: str = option(
        "512",
        metavar="N|LOW:HIGH",
        help="Number of tokens in each prompt, or a range.",
        rich_help_panel=PROMPTS,
    )
    output_tokens: str = option(
        "64",
        metavar="N|LOW:HIGH",
        help="Number of tokens in each answer, or a range.",
        rich_help_panel=PROMPTS,
    )
    prefix_tokens: int = option(
        0, min=0, help="Number of tokens of a shared prefix.", rich_help_panel=PROMPTS
    )
    num_prefixes: int = option(
        1, min=1, help="Number of different shared prefixes.", rich_help_panel=PROMPTS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of `simulate`."""

    cluster: SimulatedCluster
    engine: EngineOptions
    load: SimulatedLoad
    trace: TraceOptions
    slo: str | None = option(
        None,
        metavar="ttft=500ms,tpot=50ms,e2e=5s",
        help="Latency limits that an answer must meet; the report then has the goodput.",
        rich_help_panel=RESULTS,
    )
    json: Path | None = option(
        None,
        metavar="FILE",
        help="JSON file for the report, which `moe-serve bench compare` reads.",
        rich_help_panel=RESULTS,
    )
    save_requests: bool = option(
        False,
        "--save-requests",
        help="Also write the figures of every request into the report.",
        rich_help_panel=RESULTS,
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

    if options.save_requests and options.json is None:
        raise BenchError("--save-requests takes --json FILE, into which they go.")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise BenchError(f"cannot write {options.json}: its folder does not exist.")
    cluster = options.cluster
    layout = Layout.parse(cluster.layout, cluster.devices, cluster.tensor_shards)
    model, workload = _costed(cluster, layout), _workload(options)
    run = SimulatedRun(
        model=model,
        settings=_settings(options, layout, workload, model.size.max_context),
        workload=workload,
        slo=None if options.slo is None else Slo.parse(options.slo),
    )
    report = run_simulation(run)
    print_report(wide_console(), report)
    if options.json is not None:
        report.write(options.json, has_records=options.save_requests)
        typer.echo(f"report: {options.json}")


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
    )


def _workload(options: SimulateOptions) -> Workload:
    from moe_serve.cli.bench.bench_plan import check_load, workload_of

    load, trace = options.load, options.trace
    is_at_once = load.concurrency is None and load.rate is None and trace.trace is None
    arrivals = ArrivalOptions(
        concurrency=(load.requests or 100) if is_at_once else load.concurrency,
        rate=load.rate,
        burstiness=load.burstiness,
        requests=load.requests,
        seed=load.seed,
    )
    prompts = PromptOptions(
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        prefix_tokens=load.prefix_tokens,
        num_prefixes=load.num_prefixes,
    )
    check_load(arrivals, prompts, trace)
    return workload_of(arrivals, prompts, trace)
