"""The solver `ilp`: every layer's integer program in slices of time, from a searched plan on.

S scenarios, L layers, E experts, D devices, R copies.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experts.placement.bound import Bound, lower_bound
from experts.placement.copies import copies_of, placement_of
from experts.placement.copy_load import CopyLoad
from experts.placement.feasible import pins_of_layer
from experts.placement.ilp.layer_state import LayerState, Proof
from experts.placement.ilp.layer_task import LayerTask
from experts.placement.problem import PlacementProblem
from experts.placement.search.solver import Search
from experts.placement.solution import Progress, Solution, Solver


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpOptions:
    """Time is given out in rounds: each open layer gets a slice, twice as long in the next."""

    first_slice_s: float = 0.5
    longest_slice_s: float = 4.0  # HiGHS hears no Ctrl-C before its slice ends
    seconds: float = 120.0  # where `solve` is given none
    gap: float = 1e-4  # a layer this near its bound is left as it is
    max_binaries: int = 8_000  # of a whole program; a larger layer is solved in windows alone


class IlpSolver:
    """Exact for what fits; the plan is never worse than `warm_start`'s."""

    name = "ilp"

    def __init__(self, warm_start: Solver | None = None, options: IlpOptions | None = None) -> None:
        """`warm_start`: whose plan is known at first; the search's where none is named."""
        self._warm_start = Search() if warm_start is None else warm_start
        self._options = IlpOptions() if options is None else options

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        """As any solver."""
        began = time.monotonic()
        budget = self._options.seconds if seconds is None else seconds
        start = self._warm_start.solve(problem, seconds=budget / 3, report=report)
        if not start.is_complete and time.monotonic() - began < budget / 3:
            return replace(start, solver=self.name)  # Ctrl-C
        copies_LED = copies_of(start.placement, problem.loads.layers)
        counted = lower_bound(problem)
        states = [
            LayerState(task, copies_ED > 0, self._options.max_binaries)
            for task, copies_ED in zip(_tasks(problem, counted), copies_LED, strict=True)
        ]
        rounds = _Rounds(states, self._options, began, budget, report)
        try:
            is_complete = rounds.run()
        except KeyboardInterrupt:
            is_complete = False
        holds_LED = np.array([state.holds_ED for state in states]).astype(np.int64)
        return Solution(
            placement=placement_of(holds_LED, problem.loads.layers),
            objective=float(np.mean([state.objective for state in states])),
            bound=float(np.mean([state.bound for state in states])),
            bound_proof=_certificate(states, problem, counted),
            solver=self.name,
            seconds=time.monotonic() - began,
            is_complete=is_complete,
        )


class _Rounds:
    """Slices for open layers, until all are closed, time is over, or nobody wants more."""

    def __init__(
        self,
        states: list[LayerState],
        options: IlpOptions,
        began: float,
        budget: float,
        report: Callable[[Progress], bool] | None,
    ) -> None:
        self._states, self._options = states, options
        self._began, self._budget, self._report = began, budget, report

    def run(self) -> bool:
        """Whether every layer was closed, or searched until nothing was found any more."""
        slice_s = self._options.first_slice_s
        while True:
            open_states = [
                s for s in self._states if s.has_gap(self._options.gap) and not s.is_stuck
            ]
            if not open_states:
                return True
            for state in open_states:
                left = self._budget - (time.monotonic() - self._began)
                if left <= 0 or not self._goes_on():
                    return False
                state.work(min(slice_s, left))
            slice_s = min(2 * slice_s, self._options.longest_slice_s)

    def _goes_on(self) -> bool:
        spent = time.monotonic() - self._began
        num_closed = sum(state.is_closed for state in self._states)
        now = Progress(
            objective=float(np.mean([state.objective for state in self._states])),
            bound=float(np.mean([state.bound for state in self._states])),
            done=max(num_closed / len(self._states), min(1.0, spent / self._budget)),
            seconds=spent,
        )
        return self._report is None or self._report(now)


def _tasks(problem: PlacementProblem, counted: Bound) -> list[LayerTask]:
    devices = problem.devices.devices
    speeds_D = np.array([device.speed for device in devices])
    node_D = np.array([device.node for device in devices], dtype=np.int64)
    load = CopyLoad.of(problem)
    even_SL = load.totals() / speeds_D.sum()
    slots_LD, floor_SL = problem.slots_by_layer(), counted.by_SL
    return [
        _task(problem, index, slots_LD[index], speeds_D, node_D, load, even_SL, floor_SL)
        for index in range(len(problem.loads.layers))
    ]


def _task(
    problem: PlacementProblem,
    index: int,
    slots_D: NDArray[np.int64],
    speeds_D: NDArray[np.float64],
    node_D: NDArray[np.int64],
    load: CopyLoad,
    even_SL: NDArray[np.float64],
    floor_SL: NDArray[np.float64],
) -> LayerTask:
    layer, num_experts = problem.loads.layers[index], problem.loads.num_experts
    most = max(1, min(len(slots_D), 1 + int(slots_D.sum()) - num_experts))
    shares_SE1 = load.shares_SLE[:, index, :, None]
    each_SER = load.each(shares_SE1, np.arange(1, most + 1)) / even_SL[:, index, None, None]
    grouping, move = problem.grouping, problem.move
    is_current_ED = None
    if move is not None and move.max_copies_per_layer is not None:
        is_current_ED = copies_of(move.current, [layer])[0] > 0
    return LayerTask(
        copy_load_SER=each_SER,
        slots_D=slots_D,
        speeds_D=speeds_D,
        node_D=node_D,
        floor_S=floor_SL[:, index],
        is_filled=problem.fill,
        pins=tuple(pins_of_layer(problem.pins, layer)),
        group_E=None if grouping is None else group_of(num_experts, grouping.num_groups),
        max_nodes_per_group=1 if grouping is None else grouping.max_nodes_per_group,
        is_current_ED=is_current_ED,
        max_moves=0 if move is None else move.max_copies_per_layer or 0,
    )


def group_of(num_experts: int, num_groups: int) -> NDArray[np.int64]:
    """By expert; groups are equal runs."""
    return np.arange(num_experts) * num_groups // num_experts


def _certificate(states: list[LayerState], problem: PlacementProblem, counted: Bound) -> str:
    """What was proved, of how many layers."""
    closed = [state.proof for state in states if state.is_closed]
    others = Counter(state.proof for state in states if not state.is_closed)
    num_by_highs = closed.count(Proof.OPTIMAL)
    parts = []
    if closed:
        how = [f"{num_by_highs} by HiGHS to 1e-5"] * (num_by_highs > 0)
        how += [f"{len(closed) - num_by_highs} at a bound"] * (num_by_highs < len(closed))
        parts.append(f"{len(closed)} of {len(states)} layers proved best ({', '.join(how)})")
    if others[Proof.RELAXATION]:
        parts.append(f"{others[Proof.RELAXATION]} bounded by HiGHS's relaxation")
    if others[Proof.COUNTING] + others[Proof.OPTIMAL]:
        parts.append(f"{others[Proof.COUNTING] + others[Proof.OPTIMAL]} bounded by counting")
    if problem.bytes_per_expert is not None:
        parts.append("memory shared between layers as it was")
    return f"{'; '.join(parts)}. {counted.proof}"
