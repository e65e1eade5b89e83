"""Checks that a plan fits a model and the devices of a cluster."""

from __future__ import annotations

from experts.placement.formats.engine_plan import EnginePlan, PlanFacts
from experts.placement.problem.devices import ClusterDevices
from experts.placement.problem.model_facts import ModelFacts
from experts.placement.problem.placement import Placement

_GIB = 2**30


def gib(num_bytes: float) -> str:
    """Formats a size as "1.50 GiB", or small ones as "3.21 MB"."""
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 100 else f"{num_bytes / 1e6:.2f} MB"


def check_numbers(placement: Placement, known: PlanFacts) -> None:
    """Checks the plan against the known facts; unknown facts are taken from the plan. Raises
    PlacementError."""
    is_whole = known.layers is not None and known.num_experts is not None
    placement.check_fits(
        tuple(placement.ranks_of) if known.layers is None else known.layers,
        known.num_experts or placement.num_experts,
        (known.num_devices if is_whole else None) or placement.num_ranks,  # or `misfits` tells it
    )


def misfits(plan: EnginePlan, cluster: ClusterDevices | None, model: ModelFacts) -> list[str]:
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


def plan_words(plan: EnginePlan, model: ModelFacts) -> str:
    """Describes a plan: its format, its numbers, and the memory it takes."""
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


def plan_notes(
    plan: EnginePlan, cluster: ClusterDevices | None, model: ModelFacts, num_experts: int | None
) -> list[str]:
    """Returns what was not checked, and what some engines refuse."""
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
