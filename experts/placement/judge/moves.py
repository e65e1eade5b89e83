"""Counts the moves from the current plan to another: copies, bytes and seconds.

L layers, E experts, D devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.copies import copies_of
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The copies that devices must receive; each comes from the nearest device that holds its
    expert."""

    copies: int  # over all layers
    most_of_layer: int
    between_nodes: int  # part of `copies`
    num_bytes: int | None  # None if the bytes of an expert are unknown
    seconds: float | None  # time of the slowest device, sending or receiving

    @property
    def sentence(self) -> str:
        words = (
            f"{self.copies} copies, at most {self.most_of_layer} in a layer, {self.between_nodes} "
            "of them between nodes"
        )
        if self.num_bytes is None or self.seconds is None:
            return f"{words}; say what an expert weighs for bytes and seconds"
        return f"{words}: {self.num_bytes / 1e9:.3f} GB in {self.seconds:.2f} s"


def count_moves(problem: PlacementProblem, after: Placement) -> Moves | None:
    """Count the moves; None without a current plan. Among equally near senders the one that has
    sent least so far is used."""
    if problem.move is None:
        return None
    layers, devices = problem.loads.layers, problem.devices
    before_LED = copies_of(problem.move.current, layers) > 0
    new_LED = (copies_of(after, layers) > 0) & ~before_LED
    node_D = np.array([device.node for device in devices.devices])
    within = 1.0 / devices.bytes_per_s_in_node
    between = 1.0 / devices.bytes_per_s_between_nodes
    sends_D, gets_D = np.zeros(len(devices)), np.zeros(len(devices))
    num_between = 0
    for layer, expert, device in zip(*np.nonzero(new_LED), strict=True):
        source = _source(before_LED[layer, expert], node_D, int(device), sends_D)
        is_between = node_D[source] != node_D[device]
        num_between += int(is_between)
        cost = between if is_between else within
        sends_D[source] += cost
        gets_D[device] += cost
    weight, copies = problem.bytes_per_expert, int(new_LED.sum())
    slowest = float(np.maximum(sends_D, gets_D).max())
    return Moves(
        copies=copies,
        most_of_layer=int(new_LED.sum(axis=(1, 2)).max()),
        between_nodes=num_between,
        num_bytes=None if weight is None else copies * weight,
        seconds=None if weight is None else slowest * weight,
    )


def _source(
    holds_D: NDArray[np.bool_],
    node_D: NDArray[np.int64],
    device: int,
    sends_D: NDArray[np.float64],
) -> int:
    """Choose a device on the same node if there is one."""
    holders = np.flatnonzero(holds_D)
    near = holders[node_D[holders] == node_D[device]]
    candidates = near if len(near) else holders
    return int(candidates[sends_D[candidates].argmin()])
