"""Measures the fan-out of tokens: the distinct devices and nodes of their rows, and the traffic
between nodes.

N tokens, L layers, K choices of a token in a layer, D devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement_error import PlacementError
from experts.placement.problem.devices import Devices
from experts.placement.problem.loads import TokenChoices
from experts.placement.problem.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOut:
    """Means over tokens, by layer. Copies of an expert take turns, as in `Placement.choice`."""

    devices_per_token_L: NDArray[np.float64]  # distinct devices; a row is sent once to each
    nodes_per_token_L: NDArray[np.float64]  # distinct nodes
    cross_node_pairs_L: NDArray[np.float64]  # of L - 1 pairs of layers, see `cross_node_pairs`
    ingress_LD: NDArray[np.float64]  # rows that a device receives, per token
    num_nodes: int

    @property
    def devices_per_token(self) -> float:
        """Mean over layers."""
        return float(self.devices_per_token_L.mean())

    @property
    def nodes_per_token(self) -> float:
        """Mean over layers."""
        return float(self.nodes_per_token_L.mean())

    @property
    def cross_node_pairs(self) -> float:
        """Share of pairs (expert of a layer, expert of the next) of one token that are on two
        nodes: the traffic if a row went from an expert straight to the next layer's expert, without
        returning home."""
        return float(self.cross_node_pairs_L.mean()) if len(self.cross_node_pairs_L) else 0.0

    @property
    def cross_node_rows(self) -> float:
        """Rows of a token and layer that go to another node, if homes are spread evenly over nodes.
        A row is sent once to each device, so placement changes this only through
        `devices_per_token`."""
        return self.devices_per_token * (1.0 - 1.0 / self.num_nodes)


def measure_fan_out(placement: Placement, choices: TokenChoices, devices: Devices) -> FanOut:
    """Measure the fan-out of a placement. Raises PlacementError unless it is for these layers and
    devices."""
    _check_same(placement, choices, devices)
    node_D = np.array([device.node for device in devices.devices])
    devices_L, nodes_L, ingress_LD, node_pairs_L = [], [], [], []
    before_NK: NDArray[np.int64] | None = None
    for index, layer in enumerate(choices.layers):
        device_NK = placement.assign(layer, choices.expert_ids_NLK[:, index].astype(np.int64))
        is_first_NK, sorted_NK = _firsts(device_NK)
        devices_L.append(is_first_NK.sum(axis=1).mean())
        nodes_L.append(_firsts(node_D[device_NK])[0].sum(axis=1).mean())
        ingress_D = np.bincount(sorted_NK[is_first_NK], minlength=len(devices))
        ingress_LD.append(ingress_D / len(device_NK))
        if before_NK is not None:
            node_pairs_L.append(_crossing(node_D[before_NK], node_D[device_NK]))
        before_NK = device_NK
    return FanOut(
        devices_per_token_L=np.array(devices_L),
        nodes_per_token_L=np.array(nodes_L),
        cross_node_pairs_L=np.array(node_pairs_L),
        ingress_LD=np.array(ingress_LD),
        num_nodes=devices.num_nodes,
    )


def _check_same(placement: Placement, choices: TokenChoices, devices: Devices) -> None:
    placement.check_fits(choices.layers, choices.num_experts, len(devices))
    if placement.lost:
        raise PlacementError(
            f"The placement has {len(placement.lost)} experts on no device; give every expert a "
            "device."
        )


def _firsts(of_NK: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return each row sorted, and a mask of the first occurrence of each value in it."""
    sorted_NK = np.sort(of_NK, axis=1)
    is_first_NK = np.ones(of_NK.shape, dtype=bool)
    is_first_NK[:, 1:] = sorted_NK[:, 1:] != sorted_NK[:, :-1]
    return is_first_NK, sorted_NK


def _crossing(here_NK: NDArray[np.int64], next_NK: NDArray[np.int64]) -> float:
    """Share of pairs of one token that differ."""
    top_k = here_NK.shape[1]
    num_crossing = sum(int((here_NK != next_NK[:, k : k + 1]).sum()) for k in range(top_k))
    return num_crossing / float(here_NK.size * top_k)
