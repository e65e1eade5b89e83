"""The solver for the objective `fan-out`: few nodes and devices for each token, at a capped
balance.

S scenarios, L layers, E experts, D devices, C copies of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.balance import device_loads, objective_of
from experts.placement.judge.copies import CopyLoad, copies_of
from experts.placement.placement_error import PlacementError
from experts.placement.problem.loads import TokenChoices
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Progress, Solution, Solver
from experts.placement.solvers.fan_out.layer_copies import LayerCopies, LayerLimits
from experts.placement.solvers.fan_out.layer_cost import CostWeights, TokenSets
from experts.placement.solvers.fan_out.layer_descent import (
    Descent,
    Neighbours,
    kinds_of,
    node_of,
    relabelled,
)
from experts.placement.solvers.fan_out.layer_search import LayerSearch
from experts.placement.solvers.search.search_solver import Search
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
        """Solves the problem. `Progress` reports the balance at first; later its objective is the
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
            state = FanOutState(problem, choices, start.placement, self._options)
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
            f"The trace has {choices.num_experts} experts in {len(choices.layers)} layers, "
            f"but the loads have {theirs[1]} in {len(theirs[0])}: fan-out needs a trace of "
            "the same model."
        )


def _least_nodes(problem: PlacementProblem, top_k: int) -> float:
    """Least number of nodes that a token needs, from the nodes' slots."""
    slots_M = np.zeros(problem.devices.num_nodes)
    for device in problem.devices.devices:
        slots_M[device.node] += device.num_slots
    return 1.0 + float(np.searchsorted(np.cumsum(np.sort(slots_M)[::-1]), top_k))


class FanOutState:
    """The state of a fan-out search. If no rule prevents it, the devices' bundles are first moved
    where they cross nodes least."""

    def __init__(
        self,
        problem: PlacementProblem,
        choices: TokenChoices,
        placement: Placement,
        options: FanOutOptions,
    ) -> None:
        kinds_LD = None
        if not (problem.pins or problem.grouping or problem.move):
            slots_LD = problem.slots_by_layer()
            placement = relabelled(placement, choices, problem.devices, slots_LD)
            kinds_LD = kinds_of(problem.devices, slots_LD)
        self._start, self._options, self._layers = placement, options, problem.loads.layers
        self._copies = _layer_copies(problem, placement)
        chosen = [
            copies.chosen_copies(layer, choices.expert_ids_NLK[:, index].astype(np.int64))
            for index, (layer, copies) in enumerate(zip(self._layers, self._copies, strict=True))
        ]
        self._descent = Descent(
            _searches(problem, placement, self._copies, chosen, options),
            [copies.device_C for copies in self._copies],
            Neighbours(chosen, [len(copies.expert_C) for copies in self._copies]),
            node_of(problem.devices),
            kinds_LD,
        )

    def descend(self, goes_on: Callable[[float, float], bool], seconds: float | None) -> bool:
        """Runs the descent; returns whether it came to its end, see `Descent.run`."""
        patience, max_sweeps = self._options.patience, self._options.max_sweeps
        return self._descent.run(patience, max_sweeps, goes_on, seconds) and self._descent.prove(
            self._options.exact_slice_s or 0.0, goes_on
        )

    @property
    def proof(self) -> str:
        """Describes what was proved about fan-out; empty if nothing was."""
        num_proved = self._descent.num_proved
        if not num_proved:
            return ""
        return (
            f" Fan-out: {num_proved} of {len(self._layers)} layers proved best by HiGHS, "
            "if the neighbouring layers stay as they are."
        )

    def placement(self) -> Placement:
        """Returns the current placement."""
        placed = zip(self._layers, self._copies, self._descent.devices, strict=True)
        ranks_of = {layer: copies.ranks_of(device_C) for layer, copies, device_C in placed}
        return replace(self._start, ranks_of=ranks_of)


def _searches(
    problem: PlacementProblem,
    placement: Placement,
    layer_copies: Sequence[LayerCopies],
    chosen: Sequence[NDArray[np.int64]],
    options: FanOutOptions,
) -> list[LayerSearch]:
    layers = problem.loads.layers
    most_SL = device_loads(problem, copies_of(placement, layers)).max(axis=2)
    speeds_D = np.array([device.speed for device in problem.devices.devices])
    return [
        LayerSearch(
            copies,
            LayerLimits.of(problem, layer, copies),
            TokenSets(chosen_NK, len(copies.expert_C)),
            speeds_D,
            most_SL[:, index] * (1.0 + options.cap),
            options.weights,
        )
        for index, (layer, copies, chosen_NK) in enumerate(
            zip(layers, layer_copies, chosen, strict=True)
        )
    ]


def _layer_copies(problem: PlacementProblem, placement: Placement) -> list[LayerCopies]:
    load = CopyLoad.of(problem)
    num_devices = len(problem.devices)
    even_SL = load.totals() / sum(device.speed for device in problem.devices.devices)
    slots_LD = problem.slots_by_layer()
    found = []
    for index, layer in enumerate(problem.loads.layers):
        ranks_of = placement.ranks_of[layer]
        counts_E = np.array([len(ranks) for ranks in ranks_of])
        each_SE = load.each(load.shares_SLE[:, index], counts_E) / even_SL[:, index, None]
        copies = LayerCopies.of(ranks_of, each_SE)
        used_D = np.bincount(copies.device_C, minlength=num_devices)
        found.append(copies.with_empty(slots_LD[index] - used_D))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOutOptions:
    """Options of the solver. `cap` is the fraction by which the largest load may exceed the one
    that `balance` reached."""

    cap: float = 0.03
    weights: CostWeights = CostWeights()
    max_tokens: int = 20_000  # a longer trace is thinned out evenly
    patience: int = 12  # swaps without a better plan before the search leaves a layer
    max_sweeps: int = 3
    seconds: float = 600.0  # default limit if `solve` is given none
    # time for a small layer's integer program; 10 with `ilp` if None
    exact_slice_s: float | None = None
