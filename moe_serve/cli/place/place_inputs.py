"""Turns the options of `moe-serve place` into requests for problems, checked before a file of loads
is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from experts.placement.problem.cluster_devices import ClusterDevices
from experts.placement.problem.model_facts import ModelFacts
from experts.placement.problem.plan_limits import Grouping, Pin
from experts.placement.sources import JudgedPlanRequest, ProblemRequest
from moe_serve.cli.place.cluster_reader import read_cluster
from moe_serve.cli.place.place_options import (
    CompareOptions,
    DeviceOptions,
    LimitOptions,
    ModelFactsOptions,
    PlanOptions,
    ShowOptions,
)
from moe_serve.cli.place.plan_files import read_plan
from moe_serve.errors import ConfigError

_PIN = re.compile(r"(?:(\d{1,9}):)?(\d{1,9})@(\d{1,9})", re.ASCII)


def plan_request(options: PlanOptions) -> ProblemRequest:
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


def _request(options: PlanOptions | CompareOptions) -> ProblemRequest:
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
    """Checks options that need others. Raises ConfigError."""
    if limits.max_moves is not None and limits.current is None:
        raise ConfigError("--max-moves counts from the plan in use: name it with --current.")
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
        raise ConfigError("--model says which layers are dense: leave out the other flags.")
    from moe_serve.model.checkpoint.expert_shape import read_expert_shape

    shape = read_expert_shape(options.folder.expanduser())
    return ModelFacts(
        num_layers=shape.num_layers,
        sparse=shape.sparse_layers,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        num_groups=shape.num_groups,
        bytes_per_expert=options.bytes_per_expert or shape.bytes_per_expert,
    )


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
            raise ConfigError(f"--pin cannot be {text!r}: it must be [LAYER:]EXPERT@DEVICE.")
        layer, expert, device = found.groups()
        number = None if layer is None else int(layer)
        pins.append(Pin(expert=int(expert), device=int(device), layer=number))
    return tuple(pins)
