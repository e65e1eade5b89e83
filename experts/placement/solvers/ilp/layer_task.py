"""The input of one layer's integer program.

S scenarios, E experts, D devices, R the most copies of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.bound import Bound
from experts.placement.judge.copies import CopyLoad, copies_of
from experts.placement.problem.feasible import pins_of_layer
from experts.placement.problem.problem import PlacementProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTask:
    """A layer's task. Its objective is the mean over scenarios of the largest load of a device."""

    # load of one of 1 .. R copies; 1 is the even load over speed
    copy_load_SER: NDArray[np.float64]
    slots_D: NDArray[np.int64]
    speeds_D: NDArray[np.float64]
    node_D: NDArray[np.int64]
    floor_S: NDArray[np.float64]  # lower bounds of the largest load, from other proofs
    is_filled: bool  # every slot is used
    pins: tuple[tuple[int, int], ...] = ()  # (expert, device)
    group_E: NDArray[np.int64] | None = None  # None if experts are not grouped
    max_nodes_per_group: int = 1
    is_current_ED: NDArray[np.bool_] | None = None  # None if moves are not limited
    max_moves: int = 0

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.copy_load_SER.shape[1])

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.slots_D)

    @property
    def most_copies(self) -> int:
        """R: the slots left for an expert when every other expert has one copy, on different
        devices."""
        return int(self.copy_load_SER.shape[2])

    def objective(self, holds_ED: NDArray[np.bool_]) -> float:
        """Returns the objective of a plan; True in `holds_ED` where a device holds an expert."""
        counts_E = holds_ED.sum(axis=1)
        each_SE = self.copy_load_SER[:, np.arange(len(counts_E)), counts_E - 1]
        return float((each_SE @ holds_ED / self.speeds_D).max(axis=1).mean())

    def fewest_copies(self, objective: float) -> NDArray[np.int64]:
        """Returns the fewest copies without which no plan of one scenario is better than
        `objective`; R + 1 if none is."""
        num_scenarios, num_experts, most = self.copy_load_SER.shape
        if num_scenarios > 1:
            return np.ones(num_experts, dtype=np.int64)
        is_better_ER = self.copy_load_SER[0] / self.speeds_D.max() < objective
        first_E = np.where(is_better_ER.any(axis=1), is_better_ER.argmax(axis=1) + 1, most + 1)
        return np.asarray(first_E, dtype=np.int64)

    def equal_devices(self) -> list[list[int]]:
        """Returns groups of two or more devices that may trade all that they hold."""
        has_history = self.is_current_ED is not None
        kinds: dict[tuple[object, ...], list[int]] = {}
        for device in range(self.num_devices):
            node = int(self.node_D[device]) if self.group_E is not None else 0
            is_own = has_history or any(device == pinned for _, pinned in self.pins)
            kind = (
                int(self.slots_D[device]),
                float(self.speeds_D[device]),
                node,
                device if is_own else -1,
            )
            kinds.setdefault(kind, []).append(device)
        return [devices for devices in kinds.values() if len(devices) > 1]


def layer_tasks(problem: PlacementProblem, counted: Bound) -> list[LayerTask]:
    """Makes a task for each layer of the loads."""
    devices = problem.devices.devices
    speeds_D = np.array([device.speed for device in devices])
    node_D = np.array([device.node for device in devices], dtype=np.int64)
    load = CopyLoad.of(problem)
    even_SL = load.totals() / speeds_D.sum()
    slots_LD, floor_SL = problem.slots_by_layer(), counted.by_SL
    return [
        _task(problem, index, slots_LD[index], speeds_D, node_D, load, even_SL, floor_SL)
        for index in range(len(problem.loads.layers))
    ]


def _task(
    problem: PlacementProblem,
    index: int,
    slots_D: NDArray[np.int64],
    speeds_D: NDArray[np.float64],
    node_D: NDArray[np.int64],
    load: CopyLoad,
    even_SL: NDArray[np.float64],
    floor_SL: NDArray[np.float64],
) -> LayerTask:
    layer, num_experts = problem.loads.layers[index], problem.loads.num_experts
    most = max(1, min(len(slots_D), 1 + int(slots_D.sum()) - num_experts))
    shares_SE1 = load.shares_SLE[:, index, :, None]
    each_SER = load.each(shares_SE1, np.arange(1, most + 1)) / even_SL[:, index, None, None]
    grouping, move = problem.grouping, problem.move
    is_current_ED = None
    if move is not None and move.max_copies_per_layer is not None:
        is_current_ED = copies_of(move.current, [layer])[0] > 0
    return LayerTask(
        copy_load_SER=each_SER,
        slots_D=slots_D,
        speeds_D=speeds_D,
        node_D=node_D,
        floor_S=floor_SL[:, index],
        is_filled=problem.fill,
        pins=tuple(pins_of_layer(problem.pins, layer)),
        group_E=None if grouping is None else group_of(num_experts, grouping.num_groups),
        max_nodes_per_group=1 if grouping is None else grouping.max_nodes_per_group,
        is_current_ED=is_current_ED,
        max_moves=0 if move is None else move.max_copies_per_layer or 0,
    )


def group_of(num_experts: int, num_groups: int) -> NDArray[np.int64]:
    """Returns the group of each expert; groups are equal consecutive runs."""
    return np.arange(num_experts) * num_groups // num_experts
