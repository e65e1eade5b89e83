"""Options of `moe-serve simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from moe_serve.cli.bench.load_options import (
    LOAD,
    RESULTS,
    LoadOptions,
    ReportOptions,
    TierOptions,
)
from moe_serve.cli.deadline_options import DeadlineOptions
from moe_serve.cli.options import option

CLUSTER, LIMITS = "Cluster", "Limits of each engine"
CELLS = "Cells"


class PrecisionChoice(str, Enum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"


class PolicyChoice(str, Enum):
    FIFO = "fifo"
    BALANCED = "balanced"


class HandOverChoice(str, Enum):
    AUTO = "auto"
    ALWAYS = "always"
    OFF = "off"


class AutoscaleChoice(str, Enum):
    STATIC = "static"
    TARGET = "target"
    PLANNED = "planned"
    ORACLE = "oracle"
    LEARNT = "learnt"


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
        help="Trace of the routers' choices or file of expert loads. It gives the number of "
        "experts that a batch activates. Default: all experts are equally popular.",
        rich_help_panel=CLUSTER,
    )
    redundant_experts: int | None = option(
        None,
        min=0,
        show_default="experts in their order",
        help="Place the experts by their loads in --routing, with so many further copies in each "
        "layer, as EPLB does.",
        rich_help_panel=CLUSTER,
    )
    scatter: bool = option(
        True,
        help="Let the times of steps vary as they did in the calibration. Applies to layouts with "
        "one device per cell and to those that `calibrate --layouts` measured.",
        rich_help_panel=CLUSTER,
    )
    http: bool | None = option(
        None,
        "--http/--no-http",
        show_default="simulated if the calibration has its costs",
        help="Simulate streams from a server; --no-http simulates the engine alone.",
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
class CellsOptions:
    """Options about several cells under one coordinator."""

    cells: str | None = option(
        None,
        metavar="LAYOUT",
        help='Cells with roles, such as "2x(1A2E prefill) 1x(4A4E decode)", in place of --devices '
        "and --layout. (8D tp4) is a cell of eight devices that have attention and experts, each "
        "attention rank on four of them.",
        rich_help_panel=CELLS,
    )
    hand_over: HandOverChoice = option(
        HandOverChoice.AUTO,
        help="Prompts to prefill cells: auto (if that is predicted to be faster), always or off.",
        rich_help_panel=CELLS,
    )
    page_link: float | None = option(
        None,
        min=1e-6,
        max=1e6,
        show_default="the device's links; with --calibration the measured ones",
        help="Speed at which a device sends KV pages to other cells, in GB per second.",
        rich_help_panel=CELLS,
    )
    own_machines: bool = option(
        False,
        "--own-machines",
        help="With --calibration: every cell has a machine of its own, like the calibrated one. "
        "Default: all cells share this machine.",
        rich_help_panel=CELLS,
    )
    autoscale: AutoscaleChoice | None = option(
        None,
        help="Number of running cells: static (all), target (follows the utilisation), planned (a "
        "forecast and a plan), oracle (knows the future requests) or learnt (Q-learning).",
        rich_help_panel=CELLS,
    )
    min_cells: int = option(
        1,
        min=1,
        help="Smallest number of cells of each role, with --autoscale.",
        rich_help_panel=CELLS,
    )
    max_cells: int | None = option(
        None,
        min=1,
        max=64,
        show_default="as many as --cells has",
        help="Largest number of cells of each role, with --autoscale.",
        rich_help_panel=CELLS,
    )
    cell_start: float = option(
        120.0,
        min=0.0,
        max=86400.0,
        help="Seconds from the start of a cell until it serves.",
        rich_help_panel=CELLS,
    )
    scale_every: float = option(
        60.0,
        min=0.1,
        max=86400.0,
        help="Seconds between two decisions of --autoscale.",
        rich_help_panel=CELLS,
    )
    target_load: float | None = option(
        None,
        min=0.01,
        max=1.0,
        help="With --autoscale target: requests over seats. Default: found for --slo, else 0.7.",
        rich_help_panel=CELLS,
    )
    plan_out: Path | None = option(
        None,
        metavar="FILE",
        help="File for the plan of --autoscale planned, for a server's cells.scale_plan.",
        rich_help_panel=CELLS,
    )
    train_days: int = option(
        8,
        min=1,
        max=1000,
        help="With --autoscale learnt: number of training days before the simulated day.",
        rich_help_panel=CELLS,
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
        show_default="the longest request; with --calibration the model's context",
        help="Largest number of tokens of a request, prompt and answer together.",
        rich_help_panel=LIMITS,
    )
    num_pages: int | None = option(
        None,
        min=1,
        show_default="what the memory holds; with --calibration as many as a server would have",
        help="Number of KV pages of one attention rank.",
        rich_help_panel=LIMITS,
    )
    page_size: int = option(
        16, min=1, max=4096, help="Number of tokens in a KV page.", rich_help_panel=LIMITS
    )
    prefix_cache: bool = option(
        True, help="Share KV pages of equal beginnings of prompts.", rich_help_panel=LIMITS
    )
    batch_policy: PolicyChoice = option(
        PolicyChoice.FIFO, help="Batch policy of the scheduler.", rich_help_panel=LIMITS
    )
    micro_batches: int | None = option(
        None,
        min=1,
        max=4,
        show_default="chosen in each step",
        help="Number of micro-batches into which a step on several ranks is split.",
        rich_help_panel=LIMITS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of `simulate`."""

    cluster: SimulatedCluster
    cells: CellsOptions
    engine: EngineOptions
    load: LoadOptions
    tiers: TierOptions
    deadlines: DeadlineOptions
    of_capacity: float | None = option(
        None,
        "--load",
        min=0.001,
        max=1000.0,
        help="Speed of the trace as a share of the capacity, the highest rate at which the queue "
        "does not grow with --order fifo; 1.2 is an overload. Replaces --scale-time.",
        rich_help_panel=LOAD,
    )
    report: ReportOptions
    timeline: Path | None = option(
        None,
        metavar="FILE",
        help="JSON file for a timeline of steps and requests, for chrome://tracing or Perfetto.",
        rich_help_panel=RESULTS,
    )
    seed: int = option(
        0,
        min=0,
        max=2**31 - 1,
        help="Seed of the random numbers. The same seed gives the same report.",
        rich_help_panel=LOAD,
    )
