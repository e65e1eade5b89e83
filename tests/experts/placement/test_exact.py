"""Small layers are planned exactly by default, with any limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.placement.judge.balance import objective_of
from experts.placement.judge.copies import copies_of, placement_of
from experts.placement.placement_error import PlacementError
from experts.placement.problem.devices import Device, Devices, even_devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.placement import contiguous
from experts.placement.problem.plan_limits import Grouping, Move, Pin
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solvers.search import search_solver
from experts.placement.solvers.search.search_solver import Search
from tests.support.placement.tiny import every_plan, faults, tiny_problems


def best_of(problem: PlacementProblem) -> float:
    """Returns the best objective of all plans that keep the limits."""
    layers = problem.loads.layers
    return min(
        objective_of(problem, copies_LED)
        for copies_LED in every_plan(problem)
        if not faults(problem, placement_of(copies_LED, layers))
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problem=tiny_problems(), data=st.data())
def test_no_plan_is_better(problem: PlacementProblem, data: st.DataObject) -> None:
    """Problems have replicas, unequal speeds, empty slots, pins and budgets of moves."""
    plans = list(every_plan(problem))
    limit = data.draw(st.sampled_from(("none", "moves", "pin")))
    if limit == "moves":
        current = placement_of(plans[data.draw(st.integers(0, len(plans) - 1))], (5,))
        budget = data.draw(st.integers(0, 3))
        problem = replace(problem, move=Move(current=current, max_copies_per_layer=budget))
    elif limit == "pin":
        expert = data.draw(st.integers(0, problem.loads.num_experts - 1))
        device = data.draw(st.integers(0, len(problem.devices) - 1))
        problem = replace(problem, pins=(Pin(expert=expert, device=device),))
    solution = Search().solve(problem)
    best = best_of(problem)
    assert faults(problem, solution.placement) == []
    assert solution.objective <= best * (1 + 2e-6)
    assert solution.bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", (0, 1, 2, 4))
def test_no_plan_that_keeps_groups_is_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    loads = ExpertLoads(
        counts_SLE=random.integers(1, 30, (1, 1, 4)).astype(np.float64),
        layers=(5,),
        scenarios=("a",),
    )
    devices = tuple(
        Device(node=index // 2, num_slots=1 + (seed + index) % 2, speed=speed)
        for index, speed in enumerate(random.choice((1.0, 2.0, 0.7), 4).tolist())
    )
    problem = PlacementProblem(
        loads=loads,
        devices=Devices(devices=devices),
        grouping=Grouping(num_groups=2, max_nodes_per_group=1 + seed % 2),
        fill=bool(seed % 3),
    )
    solution = Search().solve(problem)
    assert faults(problem, solution.placement) == []
    assert solution.objective <= best_of(problem) * (1 + 2e-6)


def drifted() -> PlacementProblem:
    """Returns three layers of eight experts on devices of two speeds; two copies may move."""
    random = np.random.default_rng(3)
    loads = ExpertLoads(
        counts_SLE=np.exp(random.normal(0, 0.9, (1, 3, 8))), layers=(0, 1, 2), scenarios=("a",)
    )
    devices = Devices(
        devices=tuple(Device(node=0, num_slots=4, speed=speed) for speed in (1.0, 1.0, 2.0))
    )
    free = PlacementProblem(loads=loads, devices=devices, fill=False)
    current = contiguous(loads.layers, 8, 3)
    return replace(free, move=Move(current=current, max_copies_per_layer=2))


def test_it_says_so_and_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = drifted()
    first, second = Search().solve(problem), Search().solve(problem)
    assert first.placement == second.placement and first.is_complete
    assert first.gap < 1e-5 and "proved best by HiGHS" in first.bound_proof
    assert first.objective == pytest.approx(
        objective_of(problem, copies_of(first.placement, problem.loads.layers))
    )
    monkeypatch.setattr(search_solver, "_MOST_CHOICES", 0)
    searched = Search().solve(problem)
    assert searched.objective >= first.objective - 1e-9
    assert "HiGHS" not in searched.bound_proof and searched.bound <= first.bound + 1e-9


def test_a_bound_of_shared_memory_is_not_claimed() -> None:
    problem = replace(drifted(), bytes_per_expert=10)
    solution = Search().solve(problem)
    assert "HiGHS" not in solution.bound_proof
    assert solution.objective == pytest.approx(Search().solve(drifted()).objective)


def test_what_is_too_large_is_refused_with_the_numbers() -> None:
    loads = ExpertLoads(counts_SLE=np.ones((1, 61, 256)), layers=tuple(range(61)), scenarios=("a",))
    message = r"61 layers of 256 experts .* on 16384 devices with 32768 slots .* at most 16 layers"
    with pytest.raises(PlacementError, match=message):
        PlacementProblem(loads=loads, devices=even_devices(16384, 1, 32768))
    PlacementProblem(loads=loads, devices=even_devices(4096, 1, 8192))
