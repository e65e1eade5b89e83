"""The plans of other engines, as references for the solvers here.

EPLB is the Expert Parallelism Load Balancer that DeepSeek published, implemented from its
description, and as a solver that plans for the mean of all scenarios, as engines do.
Global: replicas go to the expert whose copy weighs most; copies go to the lightest device that has
room, heaviest first. Hierarchical: groups of experts go to nodes, replicas are made inside each
node, and copies go to its devices. Both assume equal devices and one load vector, ignore pins and
budgets of moves, and may put an expert twice on a device; `Solution.copies_LED` then has the copies
that its placement cannot express.

The plans that engines make without loads deal experts out in order or one by one. They ignore pins,
groups and budgets of moves.

L layers, E experts, D devices, P slots, n things in m packs. Plain loops on purpose: planners'
times are compared with it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.copies import copies_in_slots
from experts.placement.placement_error import PlacementError
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Progress, Solution, judged

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def eplb_slots(
    load_LE: Floats, *, num_slots: int, num_groups: int, num_nodes: int, num_devices: int
) -> Ints:
    """Returns [L, P]: the expert in each slot, devices in order. If the groups do not divide over
    the nodes they are ignored, as if there were one group and one node."""
    num_experts = load_LE.shape[1]
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    for what, count, parts in (
        ("experts", num_experts, num_groups),
        ("slots", num_slots, num_devices),
        ("devices", num_devices, num_nodes),
    ):
        if count % parts:
            raise PlacementError(
                f"EPLB needs a number of {what} that {parts} divides, got {count}."
            )
    return np.stack(
        [
            _layer(load_E, num_slots, num_groups, num_nodes, num_devices)
            for load_E in load_LE.tolist()
        ]
    )


def _layer(
    load_E: list[float], num_slots: int, num_groups: int, num_nodes: int, num_devices: int
) -> Ints:
    group_size = len(load_E) // num_groups
    group_loads = [
        sum(load_E[group * group_size : (group + 1) * group_size]) for group in range(num_groups)
    ]
    slots: list[int] = []
    for groups in packed(group_loads, num_nodes):
        # In the order of packing, which breaks ties.
        experts = [group * group_size + i for group in groups for i in range(group_size)]
        loads = [load_E[expert] for expert in experts]
        copies = replicated(loads, num_slots // num_nodes)
        counts = np.bincount(copies, minlength=len(experts))
        weights = [loads[local] / float(counts[local]) for local in copies]
        for pack in packed(weights, num_devices // num_nodes):
            slots += [experts[copies[copy]] for copy in pack]
    return np.array(slots, dtype=np.int64)


def packed(weights: list[float], num_packs: int) -> list[list[int]]:
    """Returns packs of equal size: the heaviest thing goes to the lightest pack that has room.

    Worked example, weights 5, 4, 2, 1 in 2 packs: [0, 3] and [1, 2].
    """
    size = len(weights) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    open_packs = [(0.0, pack) for pack in range(num_packs)]  # a heap of (load, number)
    for thing in sorted(range(len(weights)), key=lambda index: -weights[index]):
        load, lightest = open_packs[0]
        packs[lightest].append(thing)
        if len(packs[lightest]) < size:
            heapq.heapreplace(open_packs, (load + weights[thing], lightest))
        else:
            heapq.heappop(open_packs)
    return packs


def replicated(loads: list[float], num_copies: int) -> list[int]:
    """Returns the thing each copy is of: one of everything, then of the thing whose copy weighs
    most."""
    copies = list(range(len(loads)))
    counts = [1] * len(loads)
    heaviest_first = [(-load, thing) for thing, load in enumerate(loads)]
    heapq.heapify(heaviest_first)
    for _ in range(num_copies - len(loads)):
        _, heaviest = heaviest_first[0]
        counts[heaviest] += 1
        copies.append(heaviest)
        heapq.heapreplace(heaviest_first, (-loads[heaviest] / counts[heaviest], heaviest))
    return copies


class Eplb:
    """The solver `eplb` (global), or `eplb-hierarchical` with the groups of the model's router."""

    def __init__(self, num_groups: int | None = None, *, hierarchical: bool = False) -> None:
        """`num_groups` defaults to that of the problem's grouping."""
        self.name = "eplb-hierarchical" if hierarchical else "eplb"
        self._hierarchical = hierarchical
        self._num_groups = num_groups

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        """Solves at once; the reported time is that of the algorithm alone."""
        slots_LD = problem.slots_by_layer()
        if (slots_LD != slots_LD[0, 0]).any():
            raise PlacementError(
                f"EPLB needs equal slots on all devices, but they have {slots_LD.min()} to "
                f"{slots_LD.max()}."
            )
        start = time.perf_counter()
        load_LE = problem.loads.shares_SLE().mean(axis=0)
        num_groups, num_nodes = self._groups(problem)
        slots_LP = eplb_slots(
            load_LE,
            num_slots=int(slots_LD[0].sum()),
            num_groups=num_groups,
            num_nodes=num_nodes,
            num_devices=len(problem.devices),
        )
        seconds_used = time.perf_counter() - start
        slots_LDC = slots_LP.reshape(*slots_LD.shape, -1)
        copies_LED = copies_in_slots(slots_LDC, problem.loads.num_experts)
        return judged(problem, copies_LED, solver=self.name, seconds=seconds_used)

    def _groups(self, problem: PlacementProblem) -> tuple[int, int]:
        if not self._hierarchical:
            return 1, 1
        num_groups = self._num_groups
        if num_groups is None and problem.grouping is not None:
            num_groups = problem.grouping.num_groups
        if num_groups is None:
            raise PlacementError(
                "Hierarchical EPLB needs the number of groups of the router: give --groups."
            )
        return num_groups, problem.devices.num_nodes


class Consecutive:
    """Assigns consecutive runs of experts to the devices; remaining slots get the first experts
    again."""

    name = "linear"

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        """See `Solver.solve`; takes no time."""
        return _solved(problem, self.name, _in_order)


class RoundRobin:
    """Assigns expert e to device e mod D; remaining slots get the first experts again, one device
    on."""

    name = "round-robin"

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        """See `Solver.solve`; takes no time."""
        return _solved(problem, self.name, _dealt)


def _solved(
    problem: PlacementProblem, name: str, place: Callable[[Ints, int, int], Ints]
) -> Solution:
    start = time.perf_counter()
    slots_LD, num_experts = problem.slots_by_layer(), problem.loads.num_experts
    num_copies_L = slots_LD.sum(axis=1) if problem.fill else np.full(len(slots_LD), num_experts)
    copies_LED = np.stack(
        [
            place(slots_D, num_experts, int(num_copies))
            for slots_D, num_copies in zip(slots_LD, num_copies_L, strict=True)
        ]
    )
    return judged(problem, copies_LED, solver=name, seconds=time.perf_counter() - start)


def _in_order(slots_D: Ints, num_experts: int, num_copies: int) -> Ints:
    copies_ED = np.zeros((num_experts, len(slots_D)), dtype=np.int64)
    if num_copies < slots_D.sum():  # even runs, because some slots stay empty anyway
        slots_D = _even_runs(slots_D, num_copies)
    device_P = np.repeat(np.arange(len(slots_D)), slots_D)
    np.add.at(copies_ED, (np.arange(num_copies) % num_experts, device_P[:num_copies]), 1)
    return copies_ED


def _even_runs(slots_D: Ints, num_copies: int) -> Ints:
    """Returns run lengths as even as the slots allow."""
    used_D = np.zeros_like(slots_D)
    for _ in range(num_copies):
        used_D[np.where(used_D < slots_D, used_D, num_copies + 1).argmin()] += 1
    return used_D


def _dealt(slots_D: Ints, num_experts: int, num_copies: int) -> Ints:
    num_devices = len(slots_D)
    copies_ED = np.zeros((num_experts, num_devices), dtype=np.int64)
    room_D = slots_D.copy()
    for copy in range(num_copies):
        expert, turn = copy % num_experts, copy // num_experts
        order_D = (np.arange(num_devices) + copy + turn) % num_devices
        open_D = order_D[(room_D[order_D] > 0) & (copies_ED[expert, order_D] == 0)]
        if len(open_D):
            copies_ED[expert, open_D[0]] = 1
            room_D[open_D[0]] -= 1
    return copies_ED
