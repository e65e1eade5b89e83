"""The solver of objective `fan-out`: few nodes and devices for a token, at a capped balance."""

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
    """Starts from a balanced plan, and swaps copies as long as a token needs fewer nodes and
    devices and no load passes the cap. `Solution.objective` is balance, as of any solver."""

    name = "fan-out"

    def __init__(
        self,
        choices: TokenChoices,
        balance: Solver | None = None,
        options: FanOutOptions | None = None,
    ) -> None:
        """`balance` makes the plan to start from, which also sets the cap: the search by itself."""
        self._choices = choices
        self._balance = Search() if balance is None else balance
        options = FanOutOptions() if options is None else options
        if options.exact_slice_s is None:
            options = replace(options, exact_slice_s=10.0 * (self._balance.name == "ilp"))
        self._options = options
        if not 0 <= self._options.cap < float("inf"):
            raise PlacementError(
                f"Fan-out may cost {self._options.cap} of balance: 0 or more, 0.03 for 3%."
            )

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        """`Progress` is of balance at first; then its objective is a token's nodes, and its bound
        the least that these can be."""
        seconds = self._options.seconds if seconds is None else seconds
        choices = _thinned(self._choices, self._options.max_tokens)
        _check_same(choices, problem)
        watch = Watch(_least_nodes(problem, choices.expert_ids_NLK.shape[2]), seconds, report)
        start = self._balance.solve(problem, seconds=seconds / 3, report=report)
        if not start.is_complete and watch.elapsed < seconds / 3:
            return replace(start, solver=self.name)  # Ctrl-C
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
            f"Tokens chose of {choices.num_experts} experts in {len(choices.layers)} layers; the "
            f"loads are of {theirs[1]} in {len(theirs[0])}: fan-out needs a trace of one model."
        )


def _least_nodes(problem: PlacementProblem, top_k: int) -> float:
    """Nodes that a token needs at least, by their slots."""
    slots_M = np.zeros(problem.devices.num_nodes)
    for device in problem.devices.devices:
        slots_M[device.node] += device.num_slots
    return 1.0 + float(np.searchsorted(np.cumsum(np.sort(slots_M)[::-1]), top_k))
