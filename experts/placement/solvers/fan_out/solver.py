"""The solver for the objective `fan-out`: few nodes and devices for each token, at a capped
balance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from experts.placement.errors import PlacementError
from experts.placement.judge.balance import objective_of
from experts.placement.judge.copies import copies_of
from experts.placement.problem.problem import PlacementProblem
from experts.placement.problem.token_choices import TokenChoices
from experts.placement.solution import Progress, Solution, Solver
from experts.placement.solvers.fan_out.options import FanOutOptions
from experts.placement.solvers.fan_out.state import State
from experts.placement.solvers.search.solver import Search
from experts.placement.solvers.search.watch import Watch

__all__ = ["FanOutOptions", "FanOutSolver"]


class FanOutSolver:
    """Starts from a balanced plan and swaps copies while a token needs fewer nodes and devices and
    no load exceeds the cap. `Solution.objective` is the balance, as for any solver."""

    name = "fan-out"

    def __init__(
        self,
        choices: TokenChoices,
        balance: Solver | None = None,
        options: FanOutOptions | None = None,
    ) -> None:
        """`balance` makes the plan to start from, which also sets the cap; by default the
        search."""
        self._choices = choices
        self._balance = Search() if balance is None else balance
        options = FanOutOptions() if options is None else options
        if options.exact_slice_s is None:
            options = replace(options, exact_slice_s=10.0 * (self._balance.name == "ilp"))
        self._options = options
        if not 0 <= self._options.cap < float("inf"):
            raise PlacementError(
                "cap (--slack) must be 0 or more, such as 0.03 for 3% of the largest load, got "
                f"{self._options.cap}."
            )

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        """Solve the problem. `Progress` reports the balance at first; later its objective is the
        nodes per token, and its bound their least possible number."""
        seconds = self._options.seconds if seconds is None else seconds
        choices = _thinned(self._choices, self._options.max_tokens)
        _check_same(choices, problem)
        watch = Watch(_least_nodes(problem, choices.expert_ids_NLK.shape[2]), seconds, report)
        start = self._balance.solve(problem, seconds=seconds / 3, report=report)
        if not start.is_complete and watch.elapsed < seconds / 3:
            return replace(start, solver=self.name)  # after Ctrl-C
        placement, is_complete, proof = start.placement, False, ""
        try:
            state = State(problem, choices, start.placement, self._options)
            try:
                left = seconds - watch.elapsed
                is_complete = state.descend(lambda nodes, done: not watch.tell(nodes, done), left)
            finally:
                placement, proof = state.placement(), state.proof
        except KeyboardInterrupt:
            is_complete = False
        return Solution(
            placement=placement,
            objective=objective_of(problem, copies_of(placement, problem.loads.layers)),
            bound=start.bound,
            bound_proof=f"Balance alone, by {start.solver}: {start.bound_proof}{proof}",
            solver=self.name,
            seconds=watch.elapsed,
            is_complete=is_complete and start.is_complete,
        )


def _thinned(choices: TokenChoices, max_tokens: int) -> TokenChoices:
    every = -(-len(choices.expert_ids_NLK) // max_tokens)
    if every == 1:
        return choices
    return TokenChoices(
        expert_ids_NLK=choices.expert_ids_NLK[::every],
        num_experts=choices.num_experts,
        layers=choices.layers,
    )


def _check_same(choices: TokenChoices, problem: PlacementProblem) -> None:
    theirs = (problem.loads.layers, problem.loads.num_experts)
    if (choices.layers, choices.num_experts) != theirs:
        raise PlacementError(
            f"The trace has {choices.num_experts} experts in {len(choices.layers)} layers and the "
            f"loads {theirs[1]} in {len(theirs[0])}: fan-out needs a trace of the same model."
        )


def _least_nodes(problem: PlacementProblem, top_k: int) -> float:
    """Least number of nodes that a token needs, from the nodes' slots."""
    slots_M = np.zeros(problem.devices.num_nodes)
    for device in problem.devices.devices:
        slots_M[device.node] += device.num_slots
    return 1.0 + float(np.searchsorted(np.cumsum(np.sort(slots_M)[::-1]), top_k))
