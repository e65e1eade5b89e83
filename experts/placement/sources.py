"""The options of a planning command, and the problem they make with the loads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from experts.placement.formats.engine_plan import EnginePlan, PlanFacts
from experts.placement.problem.cluster_devices import DeviceOrder
from experts.placement.problem.limits import Grouping, Move, Pin
from experts.placement.problem.model_facts import ModelFacts, ModelOrder
from experts.placement.problem.problem import Balance, PlacementProblem
from experts.placement.problem.workloads import Workloads, read_workloads
from moe_serve.cli.place.plan_files import only_layers, read_plan
from moe_serve.errors import ConfigError

_PIN = re.compile(r"(?:(\d{1,9}):)?(\d{1,9})@(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Posed:
    """A problem with the workloads and the model facts it was made from."""

    problem: PlacementProblem
    workloads: Workloads
    model: ModelFacts

    @property
    def plan_facts(self) -> PlanFacts:
        problem = self.problem
        return self.model.plan_facts(len(problem.devices), problem.loads.num_experts)

    def read_plan(self, path: Path) -> EnginePlan:
        """Reads a plan and keeps the layers of the loads. Raises ConfigError, PlacementError."""
        return only_layers(read_plan(path, self.plan_facts), self.problem.loads.layers, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOrder:
    """The options that every planning command has, checked as far as possible without reading a
    file."""

    files: tuple[Path, ...]
    num_windows: int
    num_experts: int | None
    top_k: int | None
    model: ModelOrder
    devices: DeviceOrder
    balance: Balance
    batch_size: int
    current: Path | None
    max_moves: int | None
    pins: tuple[Pin, ...]
    grouping: Grouping | None
    fill: bool

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> ProblemOrder:
        """Takes the options from the parameters of a command by name; options that the command
        lacks get their default. Raises ConfigError."""
        get = parameters.get
        devices = device_order(parameters)
        devices.check(is_needed=True)
        if get("max_moves") is not None and get("current") is None:
            raise ConfigError("--max-moves counts from the plan in use: name it with --current.")
        groups = get("groups")
        if groups is None and get("max_nodes_per_group", 1) != 1:
            raise ConfigError(
                "--max-nodes-per-group applies to groups: give their number with --groups."
            )
        return cls(
            files=(*(get("trace") or ()), *(get("load") or ())),
            num_windows=get("windows", 1),
            num_experts=get("num_experts"),
            top_k=get("top_k"),
            model=model_order(parameters),
            devices=devices,
            balance=cast(Balance, get("balance", "tokens")),
            batch_size=get("batch_size", 64),
            current=get("current"),
            max_moves=get("max_moves"),
            pins=_pins(get("pin") or ()),
            grouping=None
            if groups is None
            else Grouping(num_groups=groups, max_nodes_per_group=get("max_nodes_per_group", 1)),
            fill=get("fill", True),
        )

    def pose(self) -> Posed:
        """Reads every file and returns the problem. Raises ConfigError, CheckpointError,
        TraceError, PlacementError."""
        facts = self.model.facts()
        read = read_workloads(self.files, self.num_windows, self.num_experts or facts.num_experts)
        if self.num_experts not in (None, read.loads.num_experts):
            raise ConfigError(
                f"--num-experts is {self.num_experts}, and {self.files[0]} has "
                f"{read.loads.num_experts} experts: leave the flag out; it is for files that do "
                "not say how many there are."
            )
        workloads, facts = facts.with_loads(read)
        loads, tokens = workloads.loads, workloads.tokens
        cluster = self.devices.read()
        assert cluster is not None, "checked"
        slots = cluster.slots(loads.num_experts, self.devices.num_replicas)
        devices = cluster.with_slots(slots)
        move = None
        if self.current is not None:
            known = facts.plan_facts(len(devices), loads.num_experts)
            plan = only_layers(read_plan(self.current, known), loads.layers, self.current)
            move = Move(current=plan.placement, max_copies_per_layer=self.max_moves)
        of_trace = None if tokens is None else tokens.expert_ids_NLK.shape[2]
        problem = PlacementProblem(
            loads=loads,
            devices=devices,
            bytes_per_expert=facts.bytes_per_expert,
            balance=self.balance,
            batch_size=self.batch_size,
            top_k=self.top_k or of_trace or facts.top_k,
            pins=self.pins,
            grouping=self.grouping,
            move=move,
            fill=self.fill,
        )
        return Posed(problem=problem, workloads=workloads, model=facts)


def device_order(parameters: Mapping[str, Any]) -> DeviceOrder:
    """Takes the device options from the parameters of a command by name."""
    return DeviceOrder(
        cluster=parameters["cluster"],
        num_devices=parameters["num_devices"],
        num_nodes=parameters["num_nodes"],
        num_replicas=parameters.get("replicas"),
    )


def model_order(parameters: Mapping[str, Any]) -> ModelOrder:
    """Takes the model options from the parameters of a command by name."""
    return ModelOrder(
        model=parameters["model"],
        num_layers=parameters["num_layers"],
        dense_layers=parameters["dense_layers"],
        bytes_per_expert=parameters["bytes_per_expert"],
    )


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
