"""`moe-serve place check`: checks that a plan of any format fits a model and a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from experts.placement.errors import NotAPlanError, PlacementError
from experts.placement.formats.engine_plan import EnginePlan, PlanFacts
from experts.placement.problem.cluster_devices import ClusterDevices
from experts.placement.problem.model_facts import ModelFacts
from experts.placement.problem.placement import Placement
from experts.placement.sources import device_order, model_order
from moe_serve.cli.place.plan_files import read_plan
from moe_serve.cli.place.report.place_tables import gib

_GIB = 2**30
_NUM_SHOWN = 8


def run_check(parameters: Mapping[str, Any]) -> bool:
    """Prints a summary of the plan and every misfit; returns whether it fits. Raises ConfigError if
    a file cannot be read, NotAPlanError if it is not a plan."""
    path: Path = parameters["file"]
    order = device_order(parameters)
    order.check(is_needed=False)
    cluster = order.read()
    model = model_order(parameters).facts()
    num_devices = None if cluster is None else len(cluster.entries)
    known = model.plan_facts(num_devices, parameters["num_experts"])
    try:
        plan = read_plan(path, known)
        _check_fits(plan.placement, known)
    except NotAPlanError:
        raise
    except PlacementError as error:
        typer.echo(f"does not fit: {error}")
        return False
    faults = _faults(plan, cluster, model)
    for fault in faults[:_NUM_SHOWN]:
        typer.echo(f"does not fit: {path}: {fault}")
    if len(faults) > _NUM_SHOWN:
        typer.echo(f"and {len(faults) - _NUM_SHOWN} more like these")
    if not faults:
        typer.echo(f"fits: {path}: {_told(plan, model)}")
        for note in _notes(plan, cluster, model, known.num_experts):
            typer.echo(f"note: {note}")
    return not faults


def _check_fits(placement: Placement, known: PlanFacts) -> None:
    """Checks the plan against the known facts; unknown facts are taken from the plan. Raises
    PlacementError."""
    is_whole = known.layers is not None and known.num_experts is not None
    placement.check_fits(
        tuple(placement.ranks_of) if known.layers is None else known.layers,
        known.num_experts or placement.num_experts,
        (known.num_devices if is_whole else None) or placement.num_ranks,  # or `_faults` tells it
    )


def _faults(plan: EnginePlan, cluster: ClusterDevices | None, model: ModelFacts) -> list[str]:
    """Returns the faults in slots and memory; `read_plan` reports the others."""
    placement = plan.placement
    if cluster is None:
        return []
    if placement.num_ranks != len(cluster.entries):
        return [
            f"the plan is for {placement.num_ranks} devices, and {cluster.source} has "
            f"{len(cluster.entries)}."
        ]
    faults = []
    layers, copies_LD = sorted(placement.ranks_of), plan.copies_LED.sum(axis=1)
    for device, entry in enumerate(cluster.entries):
        copies_L = copies_LD[:, device]
        if entry.slots is not None and copies_L.max() > entry.slots:
            faults.append(
                f"device {device} has {entry.slots} slots, and the plan puts {copies_L.max()} "
                f"copies on it in layer {layers[int(copies_L.argmax())]}."
            )
        if entry.memory_gib is not None and model.bytes_per_expert is not None:
            needed = int(copies_L.sum()) * model.bytes_per_expert
            if needed > entry.memory_gib * _GIB:
                faults.append(
                    f"device {device} needs {gib(needed)} for {copies_L.sum()} copies in "
                    f"{len(layers)} layers, and has {entry.memory_gib:.2f} GiB."
                )
    return faults


def _told(plan: EnginePlan, model: ModelFacts) -> str:
    placement, copies_LED = plan.placement, plan.copies_LED
    copies = copies_LED.sum(axis=(1, 2))
    replicas = sorted({int(count) - placement.num_experts for count in copies})
    of_layer = str(replicas[0]) if len(replicas) == 1 else f"{replicas[0]} to {replicas[-1]}"
    words = (
        f"a plan of {plan.format}, {len(placement.ranks_of)} layers of {placement.num_experts} "
        f"experts with {of_layer} replicas on {placement.num_ranks} devices"
    )
    if model.bytes_per_expert is not None:
        most = int(copies_LED.sum(axis=(0, 1)).max()) * model.bytes_per_expert
        words += f", at most {gib(most)} on one"
    return words + "."


def _notes(
    plan: EnginePlan, cluster: ClusterDevices | None, model: ModelFacts, num_experts: int | None
) -> list[str]:
    notes = []
    if plan.num_doubled:
        notes.append(
            f"{plan.num_doubled} copies lie beside another of their expert on a device, where they "
            "take memory and no load; vLLM-Ascend and moe-serve refuse that."
        )
    counts = {int(count) for count in plan.copies_LED.sum(axis=1).ravel()}
    if len(counts) > 1:
        notes.append(
            f"devices hold {min(counts)} to {max(counts)} copies of a layer: moe-serve accepts "
            "that, but other engines require the same number on every device."
        )
    if cluster is None:
        notes.append("no cluster was given: slots and memory were not checked.")
    elif model.bytes_per_expert is None and any(e.memory_gib is not None for e in cluster.entries):
        notes.append("memory was not checked: give --model or --bytes-per-expert.")
    if model.sparse is None:
        notes.append("no model was given: its layers and experts were not checked.")
    elif num_experts is None:
        notes.append(
            "the number of experts in a layer was not checked: give --model or --num-experts."
        )
    return notes
