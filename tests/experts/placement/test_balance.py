"""Loads of devices and the engines' words for balance, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from experts.placement.judge.balance import (
    Balancedness,
    activated_experts,
    balancedness,
    device_loads,
    memory_bytes,
    objective_of,
)
from experts.placement.judge.copies import (
    copies_in_slots,
    copies_of,
    num_layers_with_repeats,
    placement_of,
)
from experts.placement.problem.devices import Device, Devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem

# Expert 0 on both devices, 1 on the first, 2 on the second.
PLACEMENT = Placement(num_ranks=2, num_experts=3, ranks_of={4: ((0, 1), (0,), (1,))})


def problem_of(*speeds: float, **parts: object) -> PlacementProblem:
    loads = ExpertLoads(
        counts_SLE=np.array([[[40.0, 40, 20]], [[2.0, 1, 1]]]), layers=(4,), scenarios=("a", "b")
    )
    devices = Devices(devices=tuple(Device(node=0, num_slots=2, speed=speed) for speed in speeds))
    return PlacementProblem(loads=loads, devices=devices, **parts)  # type: ignore[arg-type]


def test_loads_over_the_even_load() -> None:
    copies_LED = copies_of(PLACEMENT, (4,))
    loads_SLD = device_loads(problem_of(1.0, 1.0), copies_LED)
    assert loads_SLD[:, 0] == pytest.approx(np.array([[1.2, 0.8], [1.0, 1.0]]))
    assert objective_of(problem_of(1.0, 1.0), copies_LED) == pytest.approx(1.1)
    # Three times as fast: 60 of 100 take a third of the time, where 25 would be even.
    loads_SLD = device_loads(problem_of(3.0, 1.0), copies_LED)
    assert loads_SLD[0, 0] == pytest.approx(np.array([0.8, 1.6]))
    assert balancedness(problem_of(1.0, 1.0), copies_LED)["a"].mean == pytest.approx(1 / 1.2)
    assert balancedness(problem_of(3.0, 1.0), copies_LED)["a"].mean == pytest.approx(1 / 1.6)


def test_the_engines_definitions() -> None:
    found = Balancedness.of(np.array([[1.0, 1.0], [3.0, 1.0]]))
    assert (found.mean, found.worst) == pytest.approx(((1 + 2 / 3) / 2, 2 / 3))
    assert found.log_ratio == pytest.approx((1 + 2) / (1 + 3))
    assert found.excess == pytest.approx((0 + 0.5) / 2)
    assert found.p50 == pytest.approx((1 + 2 / 3) / 2)


def test_activated_experts_against_draws() -> None:
    problem = problem_of(1.0, 1.0, top_k=1, batch_size=3)
    expected_D = activated_experts(problem, copies_of(PLACEMENT, (4,)))[0, 0]
    random = np.random.default_rng(0)
    draws = random.choice(3, (20_000, 3), p=[0.4, 0.4, 0.2])
    device = random.integers(2, size=draws.shape)
    reached = [
        ((draws == 0) & (device == index)).any(axis=1).mean()
        + (draws == 1 + index).any(axis=1).mean()
        for index in range(2)
    ]
    assert expected_D == pytest.approx(reached, abs=0.02)


def test_plans_as_arrays() -> None:
    copies_LED = copies_of(PLACEMENT, (4,))
    assert copies_LED.tolist() == [[[1, 1], [1, 0], [0, 1]]]
    assert placement_of(copies_LED, (4,)) == PLACEMENT
    assert memory_bytes(copies_LED, 10) == [20, 20]
    twice = copies_in_slots(np.array([[[0, 0], [1, -1]]]), 2)
    assert twice.tolist() == [[[2, 0], [0, 1]]]
    assert num_layers_with_repeats(twice) == 1
    assert placement_of(twice, (7,)).ranks_of[7] == ((0,), (1,))
