"""Judges plans on the loads of a problem, with the same figures for all plans that are compared.

The fan-out of tokens is the number of distinct devices and nodes of their rows, with the traffic
between nodes. N tokens, L layers, K choices of a token in a layer, D devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.balance import (
    Balancedness,
    activated_experts,
    balancedness,
    memory_bytes,
    objective_of,
)
from experts.placement.judge.copies import num_layers_with_repeats, placement_of
from experts.placement.judge.steps import StepBalance, draw_steps, step_balance
from experts.placement.placement_error import PlacementError
from experts.placement.problem.devices import Devices
from experts.placement.problem.loads import TokenChoices
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem

Ints = NDArray[np.int64]


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
    """Measures the fan-out of a placement. Raises PlacementError unless it is for these layers and
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
    """Returns each row sorted, and a mask of the first occurrence of each value in it."""
    sorted_NK = np.sort(of_NK, axis=1)
    is_first_NK = np.ones(of_NK.shape, dtype=bool)
    is_first_NK[:, 1:] = sorted_NK[:, 1:] != sorted_NK[:, :-1]
    return is_first_NK, sorted_NK


def _crossing(here_NK: NDArray[np.int64], next_NK: NDArray[np.int64]) -> float:
    """Share of pairs of one token that differ."""
    top_k = here_NK.shape[1]
    num_crossing = sum(int((here_NK != next_NK[:, k : k + 1]).sum()) for k in range(top_k))
    return num_crossing / float(here_NK.size * top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOutFigures:
    """Mean fan-out over tokens and layers."""

    devices_per_token: float
    nodes_per_token: float
    cross_node_rows: float
    cross_node_pairs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The figures of one plan. Devices and memory are in device order; moves are counted
    elsewhere."""

    name: str
    objective: float
    scenarios: dict[str, Balancedness]
    num_copies: int  # of a layer, on the average rounded
    layers_with_repeats: int  # where a device holds an expert twice
    memory: list[int] | None  # bytes by device
    busiest_activated: float | None  # experts that the busiest device's step activates, expected
    step: StepBalance | None
    fan_out: FanOutFigures | None

    @property
    def mean(self) -> float:
        """Balancedness, mean over layers and scenarios."""
        return float(np.mean([each.mean for each in self.scenarios.values()]))

    @property
    def worst(self) -> float:
        """Balancedness of the worst layer of the worst scenario."""
        return min(each.worst for each in self.scenarios.values())


class Judge:
    """Judges plans on the same steps, which are drawn once."""

    def __init__(self, problem: PlacementProblem, tokens: TokenChoices | None = None) -> None:
        """`tokens` are the choices behind the loads, if they are known."""
        self._problem, self._tokens = problem, tokens

    @cached_property
    def _rows_WLE(self) -> Ints | None:  # noqa: N802
        return draw_steps(self._problem, self._tokens)

    def step(self, copies_LED: Ints) -> StepBalance | None:
        """Returns the balancedness of single steps; None if neither tokens nor top-k are known."""
        rows_WLE, has_tokens = self._rows_WLE, self._tokens is not None
        if rows_WLE is None:
            return None
        return step_balance(self._problem, copies_LED, rows_WLE, has_tokens=has_tokens)

    def judge(self, name: str, copies_LED: Ints) -> Judged:
        """Judges a plan; `copies_LED` has the layers of the loads."""
        problem, tokens = self._problem, self._tokens
        weight = problem.bytes_per_expert
        fan_out = None
        if tokens is not None:
            found = measure_fan_out(
                placement_of(copies_LED, problem.loads.layers), tokens, problem.devices
            )
            fan_out = FanOutFigures(
                devices_per_token=found.devices_per_token,
                nodes_per_token=found.nodes_per_token,
                cross_node_rows=found.cross_node_rows,
                cross_node_pairs=found.cross_node_pairs,
            )
        activated = None
        if problem.top_k is not None:
            activated = float(activated_experts(problem, copies_LED).max(axis=2).mean())
        return Judged(
            name=name,
            objective=objective_of(problem, copies_LED),
            scenarios=balancedness(problem, copies_LED),
            num_copies=round(float(copies_LED.sum(axis=(1, 2)).mean())),
            layers_with_repeats=num_layers_with_repeats(copies_LED),
            memory=None if weight is None else memory_bytes(copies_LED, weight),
            busiest_activated=activated,
            step=self.step(copies_LED),
            fan_out=fan_out,
        )
