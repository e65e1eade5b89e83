"""Distinct devices and nodes of tokens, by hand, and for other devices with the same bundles."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from experts.placement.judge.plan_judge import measure_fan_out
from experts.placement.placement_error import PlacementError
from experts.placement.problem.devices import Device, Devices, even_devices
from experts.placement.problem.loads import TokenChoices
from experts.placement.problem.placement import Placement, contiguous
from experts.placement.solvers.fan_out.layer_descent import relabelled


def choices_of(rows: list[list[list[int]]], num_experts: int) -> TokenChoices:
    ids_NLK = np.array(rows)
    layers = tuple(range(ids_NLK.shape[1]))
    return TokenChoices(expert_ids_NLK=ids_NLK, num_experts=num_experts, layers=layers)


def some_choices(num_layers: int, num_experts: int, top_k: int = 2) -> TokenChoices:
    """Returns tokens of two kinds; each kind chooses from one half of the experts, in another order
    per layer."""
    rng = np.random.default_rng(3)
    order_LE = np.array([rng.permutation(num_experts) for _ in range(num_layers)])
    half = num_experts // 2
    rows = [
        [
            order_LE[layer][kind * half + rng.permutation(half)[:top_k]]
            for layer in range(num_layers)
        ]
        for kind in rng.integers(0, 2, 300)
    ]
    return choices_of([[list(map(int, ids)) for ids in row] for row in rows], num_experts)


def test_by_hand() -> None:
    """Experts 0 .. 3 on devices 0 .. 3, two nodes. The first token uses devices 0, 1 and then 2, 3;
    the second 0, 2 and then 1, 2."""
    found = measure_fan_out(
        contiguous([0, 1], 4, 4),
        choices_of([[[0, 1], [2, 3]], [[0, 2], [1, 2]]], 4),
        even_devices(4, 2, 4),
    )
    assert found.devices_per_token_L.tolist() == [2.0, 2.0]
    assert found.nodes_per_token_L.tolist() == [1.5, 1.5]
    assert found.cross_node_pairs == pytest.approx(6 / 8), "4 of 4 and 2 of 4"
    assert found.cross_node_rows == pytest.approx(1.0), "half of two devices"
    assert found.ingress_LD.tolist() == [[1.0, 0.5, 0.5, 0.0], [0.0, 0.5, 1.0, 0.5]]


def test_copies_take_turns() -> None:
    """Expert 0 lies on devices 0 and 1, and its rows alternate between them."""
    placement = Placement(num_ranks=2, num_experts=2, ranks_of={0: ((0, 1), (1,))})
    found = measure_fan_out(placement, choices_of([[[0, 1]]] * 4, 2), even_devices(2, 1, 4))
    assert found.devices_per_token == pytest.approx(1.5)
    assert found.cross_node_pairs == 0.0, "one layer has no pairs"


def test_two_experts_of_a_device_are_one_row() -> None:
    found = measure_fan_out(
        contiguous([0], 4, 2), choices_of([[[0, 1]], [[1, 2]]], 4), even_devices(2, 2, 4)
    )
    assert found.devices_per_token == pytest.approx(1.5)
    assert found.ingress_LD.tolist() == [[1.0, 0.5]]


def test_another_models_trace_is_refused() -> None:
    with pytest.raises(PlacementError, match="4 experts on 2 ranks"):
        measure_fan_out(contiguous([0], 4, 2), choices_of([[[0, 1]]], 4), even_devices(4, 2, 4))


def test_relabelling_of_two_layers_is_the_best_of_all() -> None:
    choices, devices = some_choices(2, 8), even_devices(4, 2, 8)
    placement = contiguous([0, 1], 8, 4)
    found = measure_fan_out(relabelled(placement, choices, devices), choices, devices)
    ranks_of = placement.ranks_of[1]
    least = min(
        measure_fan_out(
            replace(
                placement,
                ranks_of={0: ranks_of, 1: tuple((label[ranks[0]],) for ranks in ranks_of)},
            ),
            choices,
            devices,
        ).cross_node_pairs
        for label in itertools.permutations(range(4))
    )
    assert found.cross_node_pairs <= least + 1e-12
    before = measure_fan_out(placement, choices, devices)
    assert found.cross_node_pairs < before.cross_node_pairs
    assert found.devices_per_token == pytest.approx(before.devices_per_token), "bundles are kept"


def test_bundles_stay_on_devices_of_their_kind() -> None:
    choices = some_choices(3, 8)
    devices = Devices(
        devices=tuple(Device(node=d // 2, num_slots=3 - d % 2, speed=1.0 + d % 2) for d in range(4))
    )
    placement = Placement(
        num_ranks=4,
        num_experts=8,
        ranks_of=dict.fromkeys(range(3), ((0,), (0,), (0,), (1,), (2,), (2,), (2,), (3,))),
    )
    after = relabelled(placement, choices, devices)
    for layer in range(3):
        sizes = [len(after.held_by(rank)[layer]) for rank in range(4)]
        assert sizes == [3, 1, 3, 1], f"layer {layer}: {sizes}"
