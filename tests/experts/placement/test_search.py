"""The search keeps every limit, finds the best plan where it is known, and stops when told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.placement.judge.balance import balancedness, objective_of
from experts.placement.judge.copies import copies_of
from experts.placement.placement_error import PlacementError
from experts.placement.problem.devices import Device, Devices, even_devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.placement import contiguous
from experts.placement.problem.plan_limits import Grouping, Move, Pin
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Progress
from experts.placement.solvers.references import Consecutive, Eplb
from experts.placement.solvers.search import descent, search_solver, watch
from experts.placement.solvers.search.improve import Effort
from experts.placement.solvers.search.search_solver import Search
from tests.support.placement.tiny import every_plan, faults, tiny_problems


def skewed(num_scenarios: int, num_layers: int, num_experts: int, seed: int = 0) -> ExpertLoads:
    random = np.random.default_rng(seed)
    common_LE = random.normal(0, 0.7, (num_layers, num_experts))
    own_SLE = random.normal(0, 0.4, (num_scenarios, num_layers, num_experts))
    return ExpertLoads(
        counts_SLE=1000 * np.exp(common_LE + own_SLE),
        layers=tuple(range(1, 1 + num_layers)),
        scenarios=tuple(f"s{index}" for index in range(num_scenarios)),
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problem=tiny_problems())
def test_tiny_plans_are_the_best_there_are(problem: PlacementProblem) -> None:
    solution = Search().solve(problem)
    assert faults(problem, solution.placement) == []
    best = min(objective_of(problem, copies_LED) for copies_LED in every_plan(problem))
    assert solution.bound <= best + 1e-9
    if problem.fill and len(problem.loads.scenarios) == 1 and problem.balance == "tokens":
        assert solution.objective <= best * 1.02
    else:  # coarser: leaving slots empty, and several scenarios in one stroke
        assert solution.objective <= best * 1.25


@st.composite
def limited_problems(draw: st.DrawFn) -> PlacementProblem:
    """Draws problems of twelve experts in two layers, with any mixture of limits."""
    seed = draw(st.integers(0, 10_000))
    num_scenarios = draw(st.integers(1, 2))
    loads = skewed(num_scenarios, 2, 12, seed)
    random = np.random.default_rng(seed)
    grouping = draw(st.sampled_from((None, None, 1, 2)))
    slots = [4, 4, 4, 4] if grouping == 1 else [5, 4, 5, 3]
    speeds = draw(st.sampled_from(((1.0,) * 4, (1.0, 2.0, 1.0, 1.5))))
    memory = draw(st.sampled_from((None, None, 70)))
    devices = Devices(
        devices=tuple(
            Device(node=i // 2, num_slots=slots[i], speed=speeds[i], memory_bytes=memory)
            for i in range(4)
        )
    )
    pins = tuple(
        Pin(expert=int(e), device=int(random.integers(4)), layer=draw(st.sampled_from((None, 1))))
        for e in random.choice(12, draw(st.integers(0, 3)), replace=False)
    )
    return PlacementProblem(
        loads=loads,
        devices=devices,
        bytes_per_expert=None if memory is None else 10,
        pins=() if grouping else pins,
        grouping=None if grouping is None else Grouping(num_groups=4, max_nodes_per_group=grouping),
        balance=draw(st.sampled_from(("tokens", "activated"))),
        top_k=2,
        fill=memory is None and draw(st.booleans()),
    )


@settings(max_examples=14, deadline=None)
@given(problem=limited_problems(), budget=st.integers(0, 5), thorough=st.booleans())
def test_every_limit_is_kept(problem: PlacementProblem, budget: int, thorough: bool) -> None:
    solver = Search(thorough=thorough)
    solution = solver.solve(problem, seconds=0.1)
    assert faults(problem, solution.placement) == []
    assert solution.bound <= solution.objective + 1e-9
    # From there, with other loads, few moves.
    loads = skewed(1, 2, 12, seed=budget)
    move = Move(current=solution.placement, max_copies_per_layer=budget)
    again = replace(problem, loads=loads, move=move, fill=False)
    moved = solver.solve(again, seconds=0.1)
    assert faults(again, moved.placement) == []
    stale = objective_of(again, copies_of(solution.placement, loads.layers))
    assert moved.objective <= stale + 1e-9


def test_the_same_seed_makes_the_same_plan() -> None:
    problem = PlacementProblem(loads=skewed(2, 3, 16), devices=even_devices(4, 1, 20))
    effort = replace(Effort.usual(2, 60), rounds=2)
    first, second = (Search(seed=3, effort=effort).solve(problem) for _ in range(2))
    assert first.placement == second.placement
    assert first.is_complete


@pytest.mark.parametrize(("num_devices", "num_replicas"), [(4, 0), (8, 8), (16, 16), (8, 24)])
def test_at_least_as_even_as_eplb(num_devices: int, num_replicas: int) -> None:
    loads = skewed(1, 4, 32)
    problem = PlacementProblem(loads=loads, devices=even_devices(num_devices, 1, 32 + num_replicas))
    ours, theirs = Search().solve(problem), Eplb().solve(problem)
    placed = copies_of(ours.placement, loads.layers)
    theirs_LED = theirs.copies_LED
    if theirs_LED is None:
        theirs_LED = copies_of(theirs.placement, loads.layers)
    mine, other = (balancedness(problem, copies)["s0"] for copies in (placed, theirs_LED))
    assert mine.mean >= other.mean and mine.worst >= other.worst
    assert mine.mean >= 0.985 * 1.0 / ours.bound


def test_one_plan_for_several_workloads_beats_the_plan_for_their_average() -> None:
    loads = skewed(4, 3, 64)
    devices = even_devices(8, 1, 72)
    average = ExpertLoads(
        counts_SLE=loads.shares_SLE().mean(axis=0, keepdims=True),
        layers=loads.layers,
        scenarios=("average",),
    )
    problem = PlacementProblem(loads=loads, devices=devices)
    ours = Search().solve(problem)
    theirs = Search().solve(PlacementProblem(loads=average, devices=devices))
    other = objective_of(problem, copies_of(theirs.placement, loads.layers))
    assert ours.objective - 1.0 < 0.3 * (other - 1.0)


def test_few_moves_recover_most_of_what_drift_lost() -> None:
    before, after = (skewed(1, 3, 64, seed) for seed in (1, 1))
    drifted = after.counts_SLE * np.exp(np.random.default_rng(5).normal(0, 0.4, (1, 3, 64)))
    after = replace(after, counts_SLE=drifted)
    devices = even_devices(8, 1, 72)
    stale = Search().solve(PlacementProblem(loads=before, devices=devices)).placement
    now = PlacementProblem(loads=after, devices=devices)
    fresh = Search().solve(now).objective
    kept = objective_of(now, copies_of(stale, after.layers))
    budget = replace(now, move=Move(current=stale, max_copies_per_layer=8))
    moved = Search().solve(budget)
    assert faults(budget, moved.placement) == []
    assert kept - moved.objective > 0.5 * (kept - fresh)
    nothing = replace(now, move=Move(current=stale, max_copies_per_layer=0))
    assert Search().solve(nothing).objective <= kept


def test_one_device_has_nothing_to_move() -> None:
    loads = skewed(1, 2, 4, seed=0)
    current = contiguous(loads.layers, 4, 1)
    move = Move(current=current, max_copies_per_layer=2)
    problem = PlacementProblem(loads=loads, devices=even_devices(1, 1, 4), move=move)
    solution = Search().solve(problem)
    assert solution.placement == current and solution.gap == pytest.approx(0.0)


def test_without_a_budget_devices_keep_what_they_can() -> None:
    """Two devices hold each other's experts: a fresh plan is the old one with swapped names."""
    loads = ExpertLoads(
        counts_SLE=np.array([[[8.0, 4, 2, 1, 1, 2]]]), layers=(0,), scenarios=("a",)
    )
    problem = PlacementProblem(loads=loads, devices=even_devices(3, 1, 6))
    plan = Search().solve(problem).placement
    turned = replace(
        plan,
        ranks_of={0: tuple(tuple((rank + 1) % 3 for rank in ranks) for ranks in plan.ranks_of[0])},
    )
    again = Search().solve(replace(problem, move=Move(current=turned)))
    assert again.placement == turned


def test_pins_and_groups_that_leave_no_place_are_told() -> None:
    loads = skewed(1, 1, 4)
    devices = Devices(
        devices=tuple(Device(node=node, num_slots=slots) for node, slots in ((0, 2), (1, 2)))
    )
    current = Consecutive().solve(PlacementProblem(loads=loads, devices=devices)).placement
    problem = PlacementProblem(
        loads=loads,
        devices=devices,
        pins=(Pin(expert=0, device=1),),
        grouping=Grouping(num_groups=2),
        move=Move(current=current, max_copies_per_layer=1),
    )
    with pytest.raises(PlacementError, match=r"Layer 1 must get \d copies|No device was found"):
        Search().solve(problem)


class TestEnding:
    """The plan is valid, whatever stops the search."""

    problem = PlacementProblem(loads=skewed(3, 6, 48), devices=even_devices(8, 1, 56))

    def test_a_deadline(self) -> None:
        solution = Search(thorough=True).solve(self.problem, seconds=0.0)
        assert not solution.is_complete
        assert faults(self.problem, solution.placement) == []

    def test_a_caller_who_has_heard_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watch, "_BETWEEN_S", 0.0)  # a fast machine would be done before
        heard: list[Progress] = []

        def report(progress: Progress) -> bool:
            heard.append(progress)
            return len(heard) < 2

        solution = Search(thorough=True).solve(self.problem, report=report)
        assert not solution.is_complete and len(heard) == 2
        assert heard[0].bound == pytest.approx(solution.bound)
        assert heard[0].seconds < heard[1].seconds
        assert heard[1].objective >= solution.objective - 1e-9
        assert faults(self.problem, solution.placement) == []

    def test_ctrl_c(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watch, "_BETWEEN_S", 0.0)

        def report(progress: Progress) -> bool:
            raise KeyboardInterrupt

        solution = Search(thorough=True).solve(self.problem, report=report)
        assert not solution.is_complete
        assert faults(self.problem, solution.placement) == []


@pytest.mark.parametrize(
    ("slots", "nodes", "pins"),
    [
        # Memory leaves room for 2 and 2 groups of two, though node 0 has slots for 3, and is fast.
        (((3, 1), (3, 3), (3, 3), (2, 2)), (0, 0, 1, 1), ()),
        # Node 0 has slots for both groups of one, and two pins of group 1 take them.
        (((1, 1), (1, 1), (1, 1)), (0, 0, 1), ((1, 0), (1, 1))),
    ],
)
def test_groups_go_where_memory_and_pins_leave_slots(
    slots: tuple[tuple[int, int], ...], nodes: tuple[int, ...], pins: tuple[tuple[int, int], ...]
) -> None:
    """`slots` are (slots of each device, slots that it has memory for)."""
    devices = tuple(
        Device(node=node, num_slots=most, memory_bytes=10 * fitting, speed=4.0 - 3.0 * node)
        for node, (most, fitting) in zip(nodes, slots, strict=True)
    )
    num_groups = 2 if pins else 4
    problem = PlacementProblem(
        loads=skewed(1, 1, 2 if pins else 8, seed=0),
        devices=Devices(devices=devices),
        bytes_per_expert=10,
        pins=tuple(Pin(expert=expert, device=device) for expert, device in pins),
        grouping=Grouping(num_groups=num_groups),
        fill=False,
    )
    assert faults(problem, Search().solve(problem).placement) == []


def test_a_group_without_a_node_is_called_one() -> None:
    """The message names no expert or device, because memory leaves no node a whole group."""
    devices = tuple(Device(node=node, num_slots=4, memory_bytes=30) for node in range(3))
    problem = PlacementProblem(
        loads=skewed(1, 1, 8, seed=0),
        devices=Devices(devices=devices),
        bytes_per_expert=10,
        grouping=Grouping(num_groups=2),
        fill=False,
    )
    why = r"No node was found for group 0 in layer \d+ within groups, pins and slots"
    with pytest.raises(PlacementError, match=why):
        Search().solve(problem)


class TestManyDevices:
    """With more than 64 devices, a changed device is compared with all others."""

    @pytest.mark.parametrize(("num_scenarios", "speed"), [(1, 1.0), (2, 1.0), (1, 1.5)])
    def test_as_even_as_the_bound_allows(self, num_scenarios: int, speed: float) -> None:
        loads = skewed(num_scenarios, 1, 128, seed=4)
        devices = tuple(
            Device(node=0, num_slots=3, speed=speed if index % 2 else 1.0) for index in range(72)
        )
        problem = PlacementProblem(loads=loads, devices=Devices(devices=devices))
        first, second = Search().solve(problem), Search().solve(problem)
        assert faults(problem, first.placement) == []
        assert first.placement == second.placement and first.is_complete
        assert first.gap < (0.004 if num_scenarios == 1 else 0.12)

    def test_work_does_not_grow_with_the_square_of_devices(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two layers of 256 experts: devices held against all others, counted. Tables of all pairs
        took about 5000 steps of 16384 pairs for each of eight layers."""
        looks = 0
        best = descent._best

        def counted(*arguments: Any) -> Any:
            nonlocal looks
            looks += len(arguments[3])
            return best(*arguments)

        monkeypatch.setattr(descent, "_best", counted)
        problem = PlacementProblem(
            loads=skewed(1, 2, 256, seed=1), devices=even_devices(128, 16, 384)
        )
        solution = Search().solve(problem)
        assert solution.gap < 0.003
        assert 128 < looks < 40_000

    def test_limits_are_kept(self) -> None:
        """The limits are pins, a budget of moves, and groups on nodes."""
        loads = skewed(1, 2, 96, seed=2)
        devices = even_devices(72, 4, 144)
        current = Search().solve(PlacementProblem(loads=loads, devices=devices)).placement
        pins = tuple(Pin(expert=e, device=e % 7) for e in (3, 5, 80))
        problem = PlacementProblem(
            loads=skewed(1, 2, 96, seed=3),
            devices=devices,
            pins=pins,
            move=Move(current=current, max_copies_per_layer=20),
        )
        moved = Search().solve(problem)
        assert faults(problem, moved.placement) == []
        stale = objective_of(problem, copies_of(current, loads.layers))
        assert moved.objective < stale
        grouped = PlacementProblem(loads=loads, devices=devices, grouping=Grouping(num_groups=8))
        assert faults(grouped, Search().solve(grouped).placement) == []


def test_a_plan_has_a_limit_of_time_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_solver, "SECONDS", 0.0)
    problem = PlacementProblem(loads=skewed(1, 2, 16), devices=even_devices(4, 1, 20))
    solution = Search().solve(problem)
    assert not solution.is_complete and faults(problem, solution.placement) == []
