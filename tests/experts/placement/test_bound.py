"""The bound is never above the best plan, and reports the reason where it is reached."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from experts.placement.judge.balance import objective_of
from experts.placement.judge.bound import TERMS, crowded, lower_bound
from experts.placement.judge.copies import placement_of
from experts.placement.judge.replicas_worth import Redundancy
from experts.placement.placement_error import PlacementError
from experts.placement.problem.devices import Device, Devices, even_devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.plan_limits import Grouping
from experts.placement.problem.problem import PlacementProblem
from tests.support.placement.tiny import every_plan, faults, tiny_problems


@settings(max_examples=100, deadline=None)
@given(problem=tiny_problems())
def test_no_plan_is_better(problem: PlacementProblem) -> None:
    best = min(objective_of(problem, copies_LED) for copies_LED in every_plan(problem))
    assert lower_bound(problem).value <= best + 1e-9


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_that_keeps_groups_is_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    loads = ExpertLoads(
        counts_SLE=random.integers(1, 30, (1, 1, 4)).astype(np.float64),
        layers=(5,),
        scenarios=("a",),
    )
    devices = tuple(
        Device(node=index // 2, num_slots=int(random.integers(1, 3)), speed=speed)
        for index, speed in enumerate(random.choice((1.0, 2.0), 4).tolist())
    )
    most_nodes = 1 + seed % 2
    try:
        problem = PlacementProblem(
            loads=loads,
            devices=Devices(devices=devices),
            fill=seed % 3 == 0,
            grouping=Grouping(num_groups=2, max_nodes_per_group=most_nodes),
        )
    except PlacementError:
        pytest.skip("nodes too small for their groups")
    plans = [plan for plan in every_plan(problem) if not faults(problem, placement_of(plan, (5,)))]
    best = min(objective_of(problem, plan) for plan in plans)
    assert lower_bound(problem).value <= best + 1e-9


def problem_of(counts_E: list[float], num_devices: int, num_slots: int) -> PlacementProblem:
    loads = ExpertLoads(counts_SLE=np.array([[counts_E]]), layers=(0,), scenarios=("a",))
    return PlacementProblem(loads=loads, devices=even_devices(num_devices, 1, num_slots))


@pytest.mark.parametrize(
    ("counts_E", "num_devices", "num_slots", "peak", "term"),
    [
        ([1, 1, 1, 1], 2, 4, 2.0, "mean"),
        # 12 in two copies, as one replica is all there is; alone on its device each time.
        ([12, 2, 2], 4, 4, 6.0, "copies"),
        # 9 shares its device with 1 at best, and 4 with 3 is less.
        ([9, 4, 3, 1], 2, 4, 10.0, "companions"),
        # Of 6, 6, 6 two are together: 12, with 1 it would be 7.
        ([6, 6, 6, 1], 2, 4, 12.0, "crowding"),
        # 8 in two copies has 1 beside it, or alone 8 with the halved 1: 4 + 1.
        ([8, 1, 1, 1, 1], 3, 6, 5.0, "companions"),
    ],
)  # fmt: skip
def test_by_hand(
    counts_E: list[float], num_devices: int, num_slots: int, peak: float, term: str
) -> None:
    bound = lower_bound(problem_of(counts_E, num_devices, num_slots))
    assert bound.value == pytest.approx(peak / (sum(counts_E) / num_devices))
    assert TERMS[int(bound.term_SL[0, 0])] == term
    assert bound.proof.count("\n") == 0 and "(1 of 1)" in bound.proof


def test_crowding_where_a_device_is_twice_as_fast() -> None:
    loads_SE = np.array([[6.0, 5.0, 4.0]])
    slots, speeds = np.array([2, 1]), np.array([2.0, 1.0])
    # 6 and 4 on the fast one: 5; 5 on the slow one: 5.
    assert crowded(loads_SE, slots, speeds)[0] == pytest.approx(5.0)


@pytest.mark.parametrize("num_nodes", [2, 3])
def test_fewer_groups_than_nodes(num_nodes: int) -> None:
    """One group has one node, and the others stay empty."""
    problem = PlacementProblem(
        loads=ExpertLoads(counts_SLE=np.array([[[3.0, 1.0]]]), layers=(0,), scenarios=("a",)),
        devices=Devices(devices=tuple(Device(node=node, num_slots=2) for node in range(num_nodes))),
        grouping=Grouping(num_groups=1),
        fill=False,
    )
    plans = [plan for plan in every_plan(problem) if not faults(problem, placement_of(plan, (0,)))]
    best = min(objective_of(problem, plan) for plan in plans)
    assert lower_bound(problem).value == pytest.approx(best) == pytest.approx(num_nodes)


def test_redundancy_needed() -> None:
    """One expert has 6 of 12 rows on four devices: an even load is 3, so one replica is needed."""
    redundancy = Redundancy.of(problem_of([6, 3, 2, 1], 4, 4))
    assert redundancy.best_H[:2].tolist() == [0.5, 1.0]
    assert (redundancy.needed(0.5), redundancy.needed(0.9)) == (0, 1)
    assert redundancy.hottest_share == pytest.approx(0.5)
    assert redundancy.hottest_over_even == pytest.approx(2.0)
    never = Redundancy.of(problem_of([100, 1], 1, 2))
    assert never.needed(1.0) == 0  # one device is always even


@pytest.mark.parametrize("num_devices", [2, 8, 64, 256])
@pytest.mark.parametrize("exponent", [0.0, 0.8, 2.0])
def test_without_replicas_it_is_no_looser_than_the_hottest_expert(
    num_devices: int, exponent: float
) -> None:
    """The simple bound is the hottest expert over the even load, on the fastest device."""
    random = np.random.default_rng(num_devices)
    weights_E = 1.0 / np.arange(1, 257) ** exponent
    counts_SLE = np.stack([random.multinomial(10**6, weights_E / weights_E.sum(), 3)] * 2)
    loads = ExpertLoads(counts_SLE=counts_SLE.astype(float), layers=(0, 1, 2), scenarios=("a", "b"))
    speeds = random.choice((1.0, 1.4), num_devices)
    devices = Devices(
        devices=tuple(Device(node=0, num_slots=256 // num_devices, speed=s) for s in speeds)
    )
    simple_SL = counts_SLE.max(axis=2) / speeds.max() / (counts_SLE.sum(axis=2) / speeds.sum())
    bound = lower_bound(PlacementProblem(loads=loads, devices=devices))
    assert (bound.by_SL >= np.maximum(simple_SL, 1.0) - 1e-9).all()
