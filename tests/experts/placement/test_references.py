"""Reference planners: the published EPLB's own example, and plans without loads."""

from __future__ import annotations

import numpy as np
import pytest

from experts.placement.judge.copies import copies_of, num_layers_with_repeats
from experts.placement.placement_error import PlacementError
from experts.placement.problem.devices import Device, Devices, even_devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.plan_limits import Grouping
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solvers.references import Consecutive, Eplb, RoundRobin, eplb_slots

WEIGHT_LE = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    dtype=np.float64,
)


def problem_of(weight_LE: np.ndarray, devices: Devices, **parts: object) -> PlacementProblem:
    loads = ExpertLoads(
        counts_SLE=weight_LE[None], layers=tuple(range(len(weight_LE))), scenarios=("a",)
    )
    return PlacementProblem(loads=loads, devices=devices, **parts)  # type: ignore[arg-type]


def test_eplb_makes_its_documented_example() -> None:
    slots_LP = eplb_slots(WEIGHT_LE, num_slots=16, num_groups=4, num_nodes=2, num_devices=8)
    assert slots_LP.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


def test_eplb_as_a_solver_keeps_groups_on_nodes() -> None:
    problem = problem_of(WEIGHT_LE, even_devices(8, 2, 16), grouping=Grouping(num_groups=4))
    solution = Eplb(hierarchical=True).solve(problem)
    assert solution.placement.ranks_of[0][5] == (0, 1)  # slots 0 and 2, two slots a device
    copies_LED = copies_of(solution.placement, (0, 1))
    for group in range(4):
        on_node = copies_LED[:, 3 * group : 3 * group + 3].sum(axis=1).reshape(2, 2, 4).any(axis=2)
        assert (on_node.sum(axis=1) == 1).all()


def test_eplb_may_put_an_expert_twice_on_a_device_and_says_so() -> None:
    """One hot expert on two devices of two slots: its copies fill a device before the cold ones."""
    problem = problem_of(np.array([[100.0, 1.0, 1.0]]), even_devices(1, 1, 4), fill=False)
    solution = Eplb().solve(
        PlacementProblem(loads=problem.loads, devices=even_devices(2, 1, 6), fill=True)
    )
    assert solution.copies_LED is not None
    assert num_layers_with_repeats(solution.copies_LED) == 1
    assert solution.copies_LED.sum() == 6
    assert len(solution.placement.ranks_of[0][0]) < solution.copies_LED[0, 0].sum()


def test_eplb_refuses_what_it_cannot_do() -> None:
    devices = Devices(devices=(Device(node=0, num_slots=7), Device(node=0, num_slots=5)))
    with pytest.raises(PlacementError, match="equal slots.*5 to 7"):
        Eplb().solve(problem_of(WEIGHT_LE, devices))
    with pytest.raises(PlacementError, match="number of groups"):
        Eplb(hierarchical=True).solve(problem_of(WEIGHT_LE, even_devices(2, 1, 12)))


def test_linear_and_round_robin_by_hand() -> None:
    problem = problem_of(np.ones((1, 4)), even_devices(2, 1, 6))
    assert Consecutive().solve(problem).placement.ranks_of[0] == ((0, 1), (0, 1), (0,), (1,))
    # Slots 4 and 5 are again of experts 0 and 1, one device on.
    assert RoundRobin().solve(problem).placement.ranks_of[0] == ((0, 1), (0, 1), (0,), (1,))
    without = problem_of(np.ones((1, 4)), even_devices(2, 1, 4))
    assert RoundRobin().solve(without).placement.ranks_of[0] == ((0,), (1,), (0,), (1,))
    assert Consecutive().solve(without).placement.ranks_of[0] == ((0,), (0,), (1,), (1,))
