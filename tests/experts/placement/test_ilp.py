"""The integer program against all plans of small problems, and its early ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from experts.placement.judge.balance import objective_of
from experts.placement.judge.copies import copies_of
from experts.placement.problem.devices import Device, Devices, even_devices
from experts.placement.problem.feasible import pins_of_layer
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import Grouping, Move, Pin, PlacementProblem
from experts.placement.solution import Progress, Solution, judged
from experts.placement.solvers.ilp.ilp_solver import IlpOptions, IlpSolver
from experts.placement.solvers.search.search_solver import Search


class FirstPlan:
    """Returns the first plan of all, a start that leaves everything to improve."""

    name = "first"

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        layers = problem.loads.layers
        holds_LED = np.array([next(plans(problem, index)) for index in range(len(layers))])
        return judged(problem, holds_LED, solver=self.name, seconds=0.0)


def plans(problem: PlacementProblem, index: int) -> Iterator[NDArray[np.int64]]:
    """Yields every plan [E, D] of a layer that keeps all limits."""
    num_experts, layer = problem.loads.num_experts, problem.loads.layers[index]
    slots_D = problem.slots_by_layer()[index].tolist()
    held_by = [
        [
            chosen
            for size in ([slots] if problem.fill else range(slots + 1))
            for chosen in itertools.combinations(range(num_experts), size)
        ]
        for slots in slots_D
    ]
    for held in itertools.product(*held_by):
        holds_ED = np.zeros((num_experts, len(slots_D)), dtype=np.int64)
        for device, experts in enumerate(held):
            holds_ED[list(experts), device] = 1
        if holds_ED.any(axis=1).all() and keeps_limits(problem, layer, holds_ED):
            yield holds_ED


def keeps_limits(problem: PlacementProblem, layer: int, holds_ED: NDArray[np.int64]) -> bool:
    if not all(holds_ED[pair] for pair in pins_of_layer(problem.pins, layer)):
        return False
    if problem.grouping is not None:
        size = problem.loads.num_experts // problem.grouping.num_groups
        for first in range(0, problem.loads.num_experts, size):
            held_D = holds_ED[first : first + size].any(axis=0)
            nodes = {problem.devices.devices[d].node for d in np.flatnonzero(held_D)}
            if len(nodes) > problem.grouping.max_nodes_per_group:
                return False
    if problem.move is not None and problem.move.max_copies_per_layer is not None:
        current_ED = copies_of(problem.move.current, [layer])[0]
        return int(((holds_ED > 0) & (current_ED == 0)).sum()) <= (
            problem.move.max_copies_per_layer
        )
    return True


def loads(num_experts: int, num_scenarios: int = 1, num_layers: int = 1) -> ExpertLoads:
    rng = np.random.default_rng(11)
    return ExpertLoads(
        counts_SLE=rng.integers(1, 60, (num_scenarios, num_layers, num_experts)).astype(float),
        layers=tuple(range(3, 3 + num_layers)),
        scenarios=tuple(f"s{index}" for index in range(num_scenarios)),
    )


def unequal() -> Devices:
    return Devices(
        devices=(
            Device(node=0, num_slots=3, speed=2.0),
            Device(node=0, num_slots=2),
            Device(node=1, num_slots=2, speed=0.5),
        )
    )


CURRENT = Placement(num_ranks=3, num_experts=6, ranks_of={3: ((0,), (0,), (1,), (1,), (2,), (2,))})
PROBLEMS = {
    "no replicas": PlacementProblem(loads=loads(6, num_layers=2), devices=even_devices(3, 1, 6)),
    "replicas": PlacementProblem(loads=loads(4), devices=even_devices(4, 1, 8)),
    "scenarios": PlacementProblem(loads=loads(5, num_scenarios=3), devices=even_devices(3, 1, 6)),
    "speeds": PlacementProblem(loads=loads(5), devices=unequal()),
    "empty slots": PlacementProblem(loads=loads(4), devices=unequal(), fill=False),
    "activated": PlacementProblem(
        loads=loads(5), devices=even_devices(3, 1, 6), balance="activated", batch_size=8, top_k=2
    ),
    "pins": PlacementProblem(
        loads=loads(6),
        devices=even_devices(3, 1, 9),
        pins=(Pin(expert=0, device=2), Pin(expert=0, device=1), Pin(expert=5, device=1, layer=3)),
    ),
    "groups": PlacementProblem(
        loads=loads(4), devices=even_devices(4, 2, 8), grouping=Grouping(num_groups=2)
    ),
    "moves": PlacementProblem(
        loads=loads(6),
        devices=even_devices(3, 1, 6),
        move=Move(current=CURRENT, max_copies_per_layer=2),
    ),
    "memory": PlacementProblem(
        loads=loads(4, num_layers=2),
        devices=Devices(devices=(Device(node=0, num_slots=4, memory_bytes=50),) * 2),
        bytes_per_expert=10,
        fill=False,
    ),
}


def best(problem: PlacementProblem) -> float:
    """Returns the best objective of all plans; layers are independent."""
    least = []
    for index, layer in enumerate(problem.loads.layers):
        alone = ExpertLoads(
            counts_SLE=problem.loads.counts_SLE[:, [index]],
            layers=(layer,),
            scenarios=problem.loads.scenarios,
        )
        one = replace(problem, loads=alone, pins=(), grouping=None, move=None)
        least.append(min(objective_of(one, plan[None]) for plan in plans(problem, index)))
    return float(np.mean(least))


@pytest.mark.parametrize("name", PROBLEMS)
def test_it_finds_the_best_of_all_plans_and_proves_it(name: str) -> None:
    problem = PROBLEMS[name]
    solution = IlpSolver(FirstPlan()).solve(problem)
    assert solution.objective == pytest.approx(best(problem), rel=2e-5)
    assert solution.is_complete and solution.gap <= 1e-5, solution.bound_proof
    num_layers = len(problem.loads.layers)
    assert f"{num_layers} of {num_layers} layers proved best" in solution.bound_proof
    copies_LED = copies_of(solution.placement, problem.loads.layers)
    assert solution.objective == pytest.approx(objective_of(problem, copies_LED))
    for index, layer in enumerate(problem.loads.layers):
        assert keeps_limits(problem, layer, copies_LED[index]), f"layer {layer}"
        held_D, slots_D = copies_LED[index].sum(axis=0), problem.slots_by_layer()[index]
        assert (held_D == slots_D).all() if problem.fill else (held_D <= slots_D).all(), f"{held_D}"


class Cyclic(FirstPlan):
    """Puts experts into the slots in order, again and again, for larger problems."""

    name = "cyclic"

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        num_experts = problem.loads.num_experts
        slots_D = problem.slots_by_layer()[0]
        device_n = np.repeat(np.arange(len(slots_D)), slots_D)
        holds_ED = np.zeros((num_experts, len(slots_D)), dtype=np.int64)
        holds_ED[np.arange(len(device_n)) % num_experts, device_n] = 1
        return judged(
            problem,
            np.array([holds_ED] * len(problem.loads.layers)),
            solver=self.name,
            seconds=0.0,
        )


LARGER = PlacementProblem(loads=loads(12, num_layers=2), devices=even_devices(6, 1, 18))


def test_windows_where_the_whole_does_not_fit() -> None:
    options = IlpOptions(max_binaries=0, seconds=90.0, first_slice_s=0.2)
    start = Cyclic().solve(LARGER).objective

    def report(progress: Progress) -> bool:
        """Stops the search once it has won this much, on a machine of any speed."""
        return progress.objective > 0.75 * start

    solution = IlpSolver(Cyclic(), options).solve(LARGER, report=report)
    assert solution.objective < 0.8 * start
    assert solution.objective >= solution.bound and "bounded by counting" in solution.bound_proof


def test_the_search_is_where_it_starts() -> None:
    searched, said = Search().solve(LARGER).objective, list[Progress]()

    def report(progress: Progress) -> bool:
        """Stops the program once it has the search's result; the search has no time limit."""
        said.append(progress)
        return progress.objective > searched + 1e-9

    solution = IlpSolver().solve(LARGER, seconds=300.0, report=report)
    assert solution.objective <= searched + 1e-9
    assert said[0].objective < Cyclic().solve(LARGER).objective, "no plan of its own before"


@pytest.mark.parametrize("way", ["no", "interrupt", "deadline"])
def test_the_best_so_far_comes_back(way: str) -> None:
    said: list[Progress] = []

    def report(progress: Progress) -> bool:
        said.append(progress)
        if way == "interrupt" and len(said) == 2:
            raise KeyboardInterrupt
        return way != "no" or len(said) < 2

    seconds = 2.0 if way == "deadline" else 20.0
    solution = IlpSolver(Cyclic()).solve(LARGER, seconds=seconds, report=report)
    assert not solution.is_complete and said, "it says how it goes"
    assert solution.objective <= Cyclic().solve(LARGER).objective
    assert solution.bound <= solution.objective
    solution.placement.check_fits(LARGER.loads.layers, 12, 6)
