"""Problems small enough to try every plan, and a checker that shares no code with the solvers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from experts.placement.judge.copies import copies_of
from experts.placement.problem.devices import Device, Devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem

Ints = NDArray[np.int64]


@st.composite
def tiny_problems(draw: st.DrawFn, *, most_experts: int = 4) -> PlacementProblem:
    """Draws problems of one layer and at most three devices, with any kind of load, speeds, slots,
    nodes and groups."""
    num_experts = draw(st.integers(2, most_experts))
    num_devices = draw(st.integers(1, 3))
    slots = [draw(st.integers(1, min(3, num_experts))) for _ in range(num_devices)]
    while sum(slots) < num_experts:
        slots[slots.index(min(slots))] += 1
    speeds = draw(st.sampled_from(((1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 0.5, 1.7))))
    devices = Devices(
        devices=tuple(
            Device(node=0, num_slots=count, speed=speeds[index])
            for index, count in enumerate(slots)
        )
    )
    num_scenarios = draw(st.integers(1, 2))
    weights = st.integers(0, 40)
    counts = [
        [float(draw(weights)) for _ in range(num_experts - 1)] + [float(draw(st.integers(1, 60)))]
        for _ in range(num_scenarios)
    ]
    return PlacementProblem(
        loads=ExpertLoads(
            counts_SLE=np.array(counts)[:, None],
            layers=(5,),
            scenarios=tuple(f"s{index}" for index in range(num_scenarios)),
        ),
        devices=devices,
        balance=draw(st.sampled_from(("tokens", "activated"))),
        batch_size=draw(st.sampled_from((1, 4, 64))),
        top_k=1,
        fill=draw(st.booleans()),
    )


def every_plan(problem: PlacementProblem) -> Iterator[Ints]:
    """Returns [1, E, D] of all plans that fit the slots and hold every expert."""
    num_experts = problem.loads.num_experts
    choices = []
    for device in problem.devices.devices:
        sizes = [device.num_slots] if problem.fill else range(device.num_slots + 1)
        choices.append([held for size in sizes for held in combinations(range(num_experts), size)])
    for held_by in product(*choices):
        copies_ED = np.zeros((num_experts, len(held_by)), dtype=np.int64)
        for device, held in enumerate(held_by):
            copies_ED[list(held), device] = 1
        if copies_ED.any(axis=1).all():
            yield copies_ED[None]


def faults(problem: PlacementProblem, placement: Placement) -> list[str]:
    """Returns the rules that a plan breaks, by counting from scratch."""
    found, layers = [], problem.loads.layers
    placement.check_fits(layers, problem.loads.num_experts, len(problem.devices))
    copies_LED = copies_of(placement, layers)
    if not copies_LED.any(axis=2).all():
        found.append("an expert is nowhere")
    for index, device in enumerate(problem.devices.devices):
        counts_L = copies_LED[:, :, index].sum(axis=1)
        if counts_L.max() > device.num_slots:
            found.append(f"device {index} has {counts_L.max()} copies in {device.num_slots} slots")
        if problem.fill and counts_L.min() < device.num_slots:
            found.append(f"device {index} has empty slots")
        if device.memory_bytes is not None and problem.bytes_per_expert is not None:
            used = int(counts_L.sum()) * problem.bytes_per_expert
            if used > device.memory_bytes:
                found.append(f"device {index} needs {used} of {device.memory_bytes} bytes")
    for pin in problem.pins:
        for layer in layers if pin.layer is None else (pin.layer,):
            if pin.device not in placement.ranks_of[layer][pin.expert]:
                found.append(f"{pin} is not there in layer {layer}")
    if problem.grouping is not None:
        node_D = np.array([device.node for device in problem.devices.devices])
        size = problem.loads.num_experts // problem.grouping.num_groups
        for copies_ED in copies_LED:
            for group in range(problem.grouping.num_groups):
                held_D = copies_ED[group * size : (group + 1) * size].any(axis=0)
                nodes = set(node_D[held_D].tolist())
                if len(nodes) > problem.grouping.max_nodes_per_group:
                    found.append(f"group {group} is on nodes {sorted(nodes)}")
    if problem.move is not None and problem.move.max_copies_per_layer is not None:
        new_LED = (copies_LED > 0) & (copies_of(problem.move.current, layers) == 0)
        most = int(new_LED.sum(axis=(1, 2)).max())
        if most > problem.move.max_copies_per_layer:
            found.append(f"{most} copies move in a layer")
    return found
