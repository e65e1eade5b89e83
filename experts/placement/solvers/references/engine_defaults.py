"""Plans that engines make without loads: experts in order, or dealt out one by one.

L layers, E experts, D devices. Pins, groups and budgets of moves are ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Progress, Solution, judged

Ints = NDArray[np.int64]


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
    """Return run lengths as even as the slots allow."""
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
