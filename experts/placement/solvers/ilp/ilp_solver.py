"""The solver `ilp`: gives every layer's integer program slices of time, starting from a searched
plan.

S scenarios, L layers, E experts, D devices, R copies.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from experts.placement.judge.bound import Bound, lower_bound
from experts.placement.judge.copies import copies_of, placement_of
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Progress, Solution, Solver
from experts.placement.solvers.ilp.layer_state import LayerState, Proof
from experts.placement.solvers.ilp.layer_task import layer_tasks
from experts.placement.solvers.search.search_solver import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpOptions:
    """Time limits. Time is spent in rounds: each open layer gets a slice, twice as long in the next
    round."""

    first_slice_s: float = 0.5
    longest_slice_s: float = 4.0  # HiGHS does not notice Ctrl-C before its slice ends
    seconds: float = 120.0  # default limit if `solve` is given none
    gap: float = 1e-4  # a layer this close to its bound is not worked on
    max_binaries: int = 8_000  # limit on a whole program; a larger layer is solved only in windows


class IlpSolver:
    """Exact for layers that fit; the plan is never worse than that of `warm_start`."""

    name = "ilp"

    def __init__(self, warm_start: Solver | None = None, options: IlpOptions | None = None) -> None:
        """`warm_start` makes the first plan; by default the search."""
        self._warm_start = Search() if warm_start is None else warm_start
        self._options = IlpOptions() if options is None else options

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        """See `Solver.solve`."""
        began = time.monotonic()
        budget = self._options.seconds if seconds is None else seconds
        start = self._warm_start.solve(problem, seconds=budget / 3, report=report)
        if not start.is_complete and time.monotonic() - began < budget / 3:
            return replace(start, solver=self.name)  # after Ctrl-C
        copies_LED = copies_of(start.placement, problem.loads.layers)
        counted = lower_bound(problem)
        states = [
            LayerState(task, copies_ED > 0, self._options.max_binaries)
            for task, copies_ED in zip(layer_tasks(problem, counted), copies_LED, strict=True)
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
    """Gives slices to open layers until all are closed, time is over, or the caller ends the
    search."""

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
        """Runs the rounds; returns whether every layer was closed or searched until nothing more
        was found."""
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


def _certificate(states: list[LayerState], problem: PlacementProblem, counted: Bound) -> str:
    """Describes what was proved, and for how many layers."""
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
