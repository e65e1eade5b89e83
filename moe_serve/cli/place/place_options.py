"""The options of `moe-serve place` and its commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_serve.cli.options import REQUIRED, argument, option

Solver = Literal["search", "ilp", "linear", "round-robin", "eplb", "eplb-hierarchical"]
Balance = Literal["tokens", "activated"]
Objective = Literal["balance", "fan-out"]

_LOADS, _MODEL, _DEVICES, _LIMITS = "Loads", "Model", "Devices", "What a plan must keep"


def _num_experts() -> int | None:
    return option(
        None,
        min=1,
        help="Number of experts in a layer.",
        show_default="as the file says, or the largest id plus 1",
        rich_help_panel=_LOADS,
    )


def _replicas() -> int | None:
    return option(
        None,
        min=0,
        help="Number of extra copies of experts (replicas) in each layer, on all devices together.",
        show_default="0, or as many as the slots in --cluster allow",
        rich_help_panel=_DEVICES,
    )


def _groups() -> int | None:
    return option(
        None,
        min=1,
        help="Number of groups into which the model divides its experts; its router chooses "
        "groups first. Default: groups do not limit the plan.",
        rich_help_panel=_LIMITS,
    )


def _balance() -> Balance:
    return option(
        "tokens",
        help="Load to make even: tokens (rows computed, for prefill) or activated "
        "(distinct experts that a step reads, for decode).",
    )


def _batch_size() -> int:
    return option(
        64,
        min=1,
        max=2**20,
        help="Number of tokens in one step. Sets the size of simulated steps, and how many "
        "distinct experts a step is expected to read.",
    )


def _seconds(default: str) -> float | None:
    return option(
        None,
        min=0.0,
        help="Time limit of the solver in seconds; the best plan found so far is used.",
        show_default=f"{default}; most plans take far less",
    )


def _as_json() -> Path | None:
    return option(None, "--json", help="JSON file for all figures.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLoadOptions:
    """Options about recorded loads."""

    trace: list[Path] | None = option(
        None,
        "--trace",
        metavar="FILE...",
        help="Routing traces, of moe-serve or in a format that `moe-serve trace import` "
        "reads. Each file is one scenario. Several files may follow one flag.",
        rich_help_panel=_LOADS,
    )
    load: list[Path] | None = option(
        None,
        "--load",
        metavar="FILE...",
        help="Tables of expert loads, from moe-serve, SGLang, vLLM, TensorRT-LLM (a "
        "folder) or CSV. Each file is one scenario. Several files may follow one "
        "flag.",
        rich_help_panel=_LOADS,
    )
    windows: int = option(
        1,
        min=1,
        help="Split each file into this many scenarios of equal length.",
        rich_help_panel=_LOADS,
    )
    num_experts: int | None = _num_experts()
    top_k: int | None = option(
        None,
        min=1,
        help="Number of experts that a token chooses in a layer.",
        show_default="as the trace or the model says",
        rich_help_panel=_LOADS,
    )

    @property
    def files(self) -> tuple[Path, ...]:
        """The traces, then the tables."""
        return (*(self.trace or ()), *(self.load or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFactsOptions:
    """Options about the model."""

    folder: str | None = option(
        None,
        "--model",
        help="Folder of a checkpoint, its config.json, or its name on a hub (OWNER/NAME): gives "
        "layers, experts and bytes per expert. No weights are downloaded.",
        rich_help_panel=_MODEL,
    )
    num_layers: int | None = option(
        None,
        min=1,
        help="Number of layers of the model, dense ones included (instead of --model).",
        rich_help_panel=_MODEL,
    )
    dense_layers: str | None = option(
        None,
        help="Numbers of the layers without routed experts, such as 0-2,5 (instead of --model).",
        rich_help_panel=_MODEL,
    )
    bytes_per_expert: int | None = option(
        None,
        min=1,
        help="Bytes of one expert in one layer, for memory and moves.",
        show_default="as the model says",
        rich_help_panel=_MODEL,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Options about the devices."""

    cluster: Path | None = option(
        None,
        help="YAML file with the devices, their slots, memory and nodes; examples are in "
        "configs/placement. A cluster file of `moe-serve launch` works too.",
        rich_help_panel=_DEVICES,
    )
    num_devices: int | None = option(
        None,
        "--devices",
        min=1,
        max=2**14,
        help="Number of identical devices (instead of --cluster).",
        rich_help_panel=_DEVICES,
    )
    num_nodes: int | None = option(
        None,
        "--nodes",
        min=1,
        help="Number of nodes that --devices are spread over evenly. Default: 1.",
        rich_help_panel=_DEVICES,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Options about the limits that a plan must keep."""

    current: Path | None = option(
        None,
        help="Plan that is in use now, in any known format; --max-moves limits the changes to it.",
        rich_help_panel=_LIMITS,
    )
    max_moves: int | None = option(
        None,
        min=0,
        help="Largest number of expert copies in each layer that may be on a device where "
        "--current does not have them. Default: no limit.",
        rich_help_panel=_LIMITS,
    )
    pin: list[str] | None = option(
        None,
        "--pin",
        metavar="[LAYER:]EXPERT@DEVICE",
        help="Put a copy of this expert on this device, in one layer or in all layers. May be "
        "given more than once.",
        rich_help_panel=_LIMITS,
    )
    groups: int | None = _groups()
    max_nodes_per_group: int = option(
        1,
        "--max-nodes-per-group",
        min=1,
        help="With --groups: largest number of nodes that may hold experts of one group.",
        rich_help_panel=_LIMITS,
    )
    fill: bool = option(
        True,
        help="Fill every slot with a copy, as other engines require. With --no-fill slots "
        "may stay empty.",
        rich_help_panel=_LIMITS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """Options of `place`."""

    loads: PlaceLoadOptions
    model: ModelFactsOptions
    devices: DeviceOptions
    replicas: int | None = _replicas()
    limits: LimitOptions
    balance: Balance = _balance()
    batch_size: int = _batch_size()
    objective: Objective = option(
        "balance",
        help="Goal: balance (even loads), or fan-out (a token's experts on few nodes; "
        "needs --trace).",
    )
    slack: float = option(
        0.03,
        min=0.0,
        help="With --objective fan-out: how much larger the largest load may become than in "
        "the balanced plan, as a share; 0.03 is 3%.",
    )
    solver: Solver = option(
        "search",
        help="Method: search; ilp (tighter bounds, takes longer); or a reference, linear, "
        "round-robin, eplb or eplb-hierarchical (references balance slots only).",
    )
    seconds: float | None = _seconds("120, or 600 for --objective fan-out")
    out: Path | None = option(
        None,
        help="JSON file for the plan; `moe-serve serve --placement` reads it. Default: the"
        " plan is not written.",
    )
    export: tuple[str, Path] | None = option(
        None,
        metavar="FORMAT FILE",
        help="Also write the plan in another format: sglang, vllm, trtllm, ascend or csv.",
    )
    as_json: Path | None = _as_json()
    is_quick: bool = option(
        False,
        "--quick",
        help="Report the plan only: no evaluation on held-out scenarios, no comparison with "
        "other numbers of replicas or with EPLB.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of `place compare`."""

    loads: PlaceLoadOptions
    model: ModelFactsOptions
    devices: DeviceOptions
    replicas: int | None = _replicas()
    groups: int | None = _groups()
    balance: Balance = _balance()
    batch_size: int = _batch_size()
    plan: list[Path] | None = option(
        None,
        metavar="FILE...",
        help="Plans in any known format to include in the comparison. Several files may "
        "follow one flag.",
    )
    seconds: float | None = _seconds("120")
    as_json: Path | None = _as_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """Options of `place show`."""

    file: Path = argument(REQUIRED, help="Plan in any known format.")
    loads: PlaceLoadOptions
    model: ModelFactsOptions
    devices: DeviceOptions
    before: Path | None = option(
        None,
        help="Earlier plan to compare the plan with.",
        show_default="an equal number of consecutive experts on each device",
    )
    batch_size: int = _batch_size()
    heatmap: Path | None = option(
        None, help="File *.png or *.html for a heat map of devices and layers, before and after."
    )
    as_json: Path | None = _as_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Options of `place check`."""

    file: Path = argument(REQUIRED, help="Plan in any known format.")
    model: ModelFactsOptions
    num_experts: int | None = _num_experts()
    devices: DeviceOptions
