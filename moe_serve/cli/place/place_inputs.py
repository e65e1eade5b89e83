"""Reads the inputs of `moe-serve place`: its options, plan files of any format, cluster files."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import yaml

from experts.placement.formats import trtllm
from experts.placement.formats.engine_plan import EnginePlan, PlanFacts
from experts.placement.formats.plan_text import parse_content, parse_text
from experts.placement.placement_error import NotAPlanError, PlacementError
from experts.placement.problem.devices import ClusterDevice, ClusterDevices
from experts.placement.problem.model_facts import ModelFacts
from experts.placement.problem.plan_limits import Grouping, Pin
from experts.placement.problem.workloads import holds_loads
from experts.placement.problem_sources import JudgedPlanRequest, ProblemRequest
from moe_serve.cli.place.place_options import (
    CompareOptions,
    DeviceOptions,
    LimitOptions,
    ModelFactsOptions,
    PlaceOptions,
    ShowOptions,
)
from moe_serve.cluster.launch.cluster_file import parse_cluster_file
from moe_serve.config.yaml_nodes import plain_value, read_yaml, value_place
from moe_serve.errors import ConfigError
from moe_serve.regular_file import regular_file
from routing_predictor.torch_files.torch_file import read_torch_file
from routing_predictor.traces.routing_error import TraceError

MAX_DEVICES = 2**14


class DeviceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device. `slots` is the number of expert copies in a layer; without it slots are shared
    out evenly."""

    slots: int | None = None
    speed: float = 1.0
    memory_gib: float | None = None  # for routed experts


class DeviceNodeEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node. `devices` is a list of devices, or a number of identical ones that have the node's
    other values."""

    devices: Annotated[int, msgspec.Meta(ge=1, le=MAX_DEVICES)] | tuple[DeviceEntry, ...]
    name: str = ""
    slots: int | None = None
    speed: float = 1.0
    memory_gib: float | None = None

    @property
    def entries(self) -> tuple[ClusterDevice, ...]:
        if not isinstance(self.devices, int):
            return tuple(_device(entry) for entry in self.devices)
        return (_device(self),) * self.devices


class PlacementCluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. Bandwidths are those of one device, in 10^9 bytes per second."""

    nodes: tuple[DeviceNodeEntry, ...]
    name: str = ""
    gb_per_s_in_node: float = 100.0
    gb_per_s_between_nodes: float = 25.0


def read_cluster(path: Path) -> ClusterDevices:
    """Reads a cluster file, of `place` or of `launch`. Raises ConfigError."""
    return _devices_of(_read_file(path), str(path))


def _device(entry: DeviceEntry | DeviceNodeEntry) -> ClusterDevice:
    return ClusterDevice(slots=entry.slots, speed=entry.speed, memory_gib=entry.memory_gib)


def _devices_of(cluster: PlacementCluster, source: str) -> ClusterDevices:
    nodes = [node.entries for node in cluster.nodes]
    if not nodes or not all(nodes):
        raise ConfigError(
            f"{source} must have at least one node, and each node at least one device."
        )
    for memory_gib in (entry.memory_gib for node in nodes for entry in node):
        if memory_gib is not None and not 0 < memory_gib < float("inf"):
            raise ConfigError(
                f"{source}: memory_gib must be above 0 and finite, or left out; got {memory_gib}."
            )
    return ClusterDevices(
        entries=tuple(entry for node in nodes for entry in node),
        nodes=tuple(number for number, node in enumerate(nodes) for _ in node),
        source=source,
        gb_per_s_in_node=cluster.gb_per_s_in_node,
        gb_per_s_between_nodes=cluster.gb_per_s_between_nodes,
    )


def _read_file(path: Path) -> PlacementCluster:
    """Reads a cluster file. Raises ConfigError."""
    root = None
    try:
        text = regular_file(path).read_text("utf-8")
        root = read_yaml(text, str(path))
        content = plain_value(root)
        if isinstance(content, dict) and "coordinator" in content:
            return _launched(text, path)
        return msgspec.convert(content, PlacementCluster)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the cluster file {path}: {reason}.") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the cluster file {path} is not valid YAML: {reason}") from None
    except (msgspec.ValidationError, RecursionError) as error:
        place = value_place(root, str(error), str(path))
        raise ConfigError(f"the cluster file {path} is wrong: {error}{place}.") from None


def _launched(text: str, path: Path) -> PlacementCluster:
    """Reads a cluster file of `moe-serve launch`, whose expert ranks are numbered over the nodes in
    order."""
    cluster = parse_cluster_file(text, str(path))
    ranks = [rank for node in cluster.nodes for rank in node.expert_ranks]
    if ranks != sorted(ranks):
        raise ConfigError(f"{path}: expert ranks must ascend from node to node, got {ranks}.")
    return PlacementCluster(
        name=cluster.name,
        nodes=tuple(
            DeviceNodeEntry(name=node.name, devices=len(node.expert_ranks))
            for node in cluster.nodes
            if node.expert_ranks
        ),
    )


_YAML = (".yaml", ".yml")
_GIVE = (
    "give a file that `moe-serve place` wrote (with --out or --export), or a plan of "
    "SGLang, vLLM, TensorRT-LLM or vLLM-Ascend."
)
_YAML_PLAN = re.compile(rf"^{trtllm.ASSIGNMENTS}:", re.MULTILINE)  # whatever the name of its file


def read_plan(path: Path, facts: PlanFacts) -> EnginePlan:
    """Reads a plan. Raises ConfigError if the file cannot be read, NotAPlanError if it is not a
    plan, PlacementError if the plan does not fit `facts`."""
    try:
        if path.suffix == ".pt":
            return parse_content(_plain(read_torch_file(path)), facts)
        text = regular_file(path).read_text("utf-8")
        if path.suffix in _YAML or _YAML_PLAN.search(text):
            content = plain_value(read_yaml(text, str(path), is_large=True))
            return parse_content(content, facts)
        return parse_text(text, facts)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise _no_plan(path, "It is not UTF-8 text.") from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise _no_plan(path, f"It is not valid YAML ({reason}).") from None
    except TraceError as error:
        raise ConfigError(f"{error}.") from None
    except NotAPlanError as error:
        raise _no_plan(path, str(error)) from None
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}") from None


def _no_plan(path: Path, reason: str) -> NotAPlanError:
    """Returns an error that says what the file is instead, and what to give."""
    if holds_loads(path):
        return NotAPlanError(f"{path} holds recorded loads and is not a plan; {_GIVE}")
    return NotAPlanError(
        f"{path} is not a plan: {reason[0].lower()}{reason[1:].removesuffix('.')}; {_GIVE}"
    )


def write_text(path: Path, text: str) -> None:
    """Writes a file completely or not at all. Raises ConfigError."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # a name that is too long cannot be removed either
            aside.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def _plain(content: object) -> object:
    """Converts the arrays of a recording to lists."""
    if not isinstance(content, dict):
        return content
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in content.items()}


_PIN = re.compile(r"(?:(\d{1,9}):)?(\d{1,9})@(\d{1,9})", re.ASCII)


def plan_request(options: PlaceOptions) -> ProblemRequest:
    """Returns the problem of `place`; `check_plan_options` was called. Raises ConfigError,
    CheckpointError, PlacementError."""
    limits = options.limits
    return replace(
        _request(options),
        current=limits.current,
        max_moves=limits.max_moves,
        pins=_pins(limits.pin or ()),
        grouping=_grouping(limits.groups, limits.max_nodes_per_group),
        fill=limits.fill,
    )


def compare_request(options: CompareOptions) -> ProblemRequest:
    """Returns the problem of `place compare`. Raises ConfigError, CheckpointError,
    PlacementError."""
    check_devices(options.devices, is_needed=True)
    return replace(_request(options), grouping=_grouping(options.groups))


def show_request(options: ShowOptions) -> JudgedPlanRequest:
    """Returns the plan to show and its loads. Raises ConfigError, CheckpointError."""
    check_devices(options.devices, is_needed=False)
    devices = read_devices(options.devices)
    return JudgedPlanRequest(
        files=options.loads.files,
        plan=options.file,
        devices=devices,
        num_nodes=options.devices.num_nodes or 1,
        model=model_facts(options.model),
        num_windows=options.loads.windows,
        num_experts=options.loads.num_experts,
        top_k=options.loads.top_k,
        batch_size=options.batch_size,
        read_plan=read_plan,
    )


def _request(options: PlaceOptions | CompareOptions) -> ProblemRequest:
    loads, model = options.loads, model_facts(options.model)
    devices = read_devices(options.devices)
    assert devices is not None, "checked"
    return ProblemRequest(
        files=loads.files,
        devices=devices,
        model=model,
        num_windows=loads.windows,
        num_experts=loads.num_experts,
        top_k=loads.top_k,
        num_replicas=options.replicas,
        balance=options.balance,
        batch_size=options.batch_size,
        read_plan=read_plan,
    )


def check_limits_given(limits: LimitOptions) -> None:
    """Checks that options are given together with those that they need. Raises ConfigError."""
    if limits.max_moves is not None and limits.current is None:
        raise ConfigError("--max-moves limits changes to a plan in use: give it with --current.")
    if limits.groups is None and limits.max_nodes_per_group != 1:
        raise ConfigError(
            "--max-nodes-per-group applies to groups: give their number with --groups."
        )
    _pins(limits.pin or ())


def check_devices(options: DeviceOptions, *, is_needed: bool) -> None:
    """Checks the options before any file is read. Raises ConfigError."""
    if options.cluster is not None and options.num_devices is not None:
        raise ConfigError("give either --cluster FILE or --devices N, not both.")
    if is_needed and options.cluster is None and options.num_devices is None:
        raise ConfigError("give --cluster FILE or --devices N: a plan needs devices.")
    if options.num_nodes is not None and options.num_devices is None:
        raise ConfigError("--nodes belongs to --devices; a cluster file states its own nodes.")


def read_devices(options: DeviceOptions) -> ClusterDevices | None:
    """Returns the devices; None if no option names any. Raises ConfigError, PlacementError."""
    if options.cluster is not None:
        return read_cluster(options.cluster)
    if options.num_devices is None:
        return None
    return ClusterDevices.even(options.num_devices, options.num_nodes or 1)


def model_facts(options: ModelFactsOptions) -> ModelFacts:
    """Returns the facts that the options give. Raises ConfigError, CheckpointError,
    PlacementError."""
    if options.folder is None:
        return ModelFacts.stated(options.num_layers, options.dense_layers, options.bytes_per_expert)
    if options.num_layers is not None or options.dense_layers is not None:
        raise ConfigError("--model gives the layers: leave out --num-layers and --dense-layers.")
    from moe_serve.model.checkpoint.expert_shape import read_expert_shape

    shape = read_expert_shape(_model_path(options.folder))
    return ModelFacts(
        num_layers=shape.num_layers,
        sparse=shape.sparse_layers,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        num_groups=shape.num_groups,
        bytes_per_expert=options.bytes_per_expert or shape.bytes_per_expert,
    )


def _model_path(given: str) -> Path:
    """Returns the path to a model. For a name on a hub, only the config.json is downloaded."""
    from moe_serve.model.hub.hub_name import hub_name_of

    name = hub_name_of(given)
    if name is None:
        return Path(given).expanduser()
    from moe_serve.model.hub.fetch import fetch_config
    from moe_serve.model.hub.hub_settings import hub_settings

    return fetch_config(name, hub_settings())


def _grouping(num_groups: int | None, max_nodes: int = 1) -> Grouping | None:
    if num_groups is None:
        return None
    return Grouping(num_groups=num_groups, max_nodes_per_group=max_nodes)


def _pins(texts: Sequence[str]) -> tuple[Pin, ...]:
    """Parses "3:17@0" as expert 17 of layer 3 on device 0, and "17@0" as expert 17 of every
    layer."""
    pins = []
    for text in texts:
        found = _PIN.fullmatch(text)
        if found is None:
            raise ConfigError(f"--pin must be [LAYER:]EXPERT@DEVICE, got {text!r}.")
        layer, expert, device = found.groups()
        number = None if layer is None else int(layer)
        pins.append(Pin(expert=int(expert), device=int(device), layer=number))
    return tuple(pins)
