"""What no plan can beat, from counting alone: for every layer and scenario the largest of

    mean          the even share of all load
    copies        an expert has at most so many copies as slots are left and as there are devices
    companions    where all slots are used, the hottest copy shares its device with others, at best
                  with the coldest
    crowding      without replicas, hot experts cannot all lie alone, nor all with the coldest
    groups        a group of experts on few nodes brings its load there

Pins and a budget of moves only make plans worse, so the bound holds with them too.
S scenarios, L layers, E experts, D devices; loads in units of the even load.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.companions import companions
from experts.placement.judge.copy_load import CopyLoad
from experts.placement.judge.crowding import crowded
from experts.placement.judge.fewest_peaks import FewestPeaks
from experts.placement.problem.problem import PlacementProblem

Floats = NDArray[np.float64]
TERMS = ("mean", "copies", "companions", "crowding", "groups")
_BECAUSE = {
    "mean": "the mean load of a device",
    "copies": "the hottest expert over as many copies as it can have",
    "companions": "the hottest copy with the coldest experts beside it",
    "crowding": "hot experts that cannot all lie with cold ones",
    "groups": "a group of experts on its nodes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`by_SL` in units of the even load: at least 1 for `tokens`."""

    by_SL: Floats
    term_SL: NDArray[np.int64]  # index in TERMS of what binds

    @property
    def value(self) -> float:
        """Of the objective."""
        return float(self.by_SL.mean())

    @property
    def proof(self) -> str:
        """What binds in how many layers, in one line."""
        num_cells = self.term_SL.size
        counts = np.bincount(self.term_SL.ravel(), minlength=len(TERMS))
        parts = [
            f"{_BECAUSE[TERMS[index]]} ({counts[index]} of {num_cells})"
            for index in np.argsort(-counts, kind="stable")
            if counts[index]
        ]
        return f"No plan's peak is below, by layer and scenario: {'; '.join(parts)}."


def lower_bound(problem: PlacementProblem) -> Bound:
    """Milliseconds; every (layer, scenario) on its own, so their mean bounds the objective."""
    load = CopyLoad.of(problem)
    slots_LD = problem.slots_by_layer()
    speed_D = np.array([device.speed for device in problem.devices.devices])
    even_SL = load.totals() / speed_D.sum()
    replicas_L = slots_LD.sum(axis=1) - problem.loads.num_experts
    peaks = FewestPeaks.of(load, np.sort(speed_D)[::-1], replicas_L, _most_copies(problem))
    terms = np.zeros((len(TERMS), *even_SL.shape))
    terms[0] = 1.0
    terms[1] = peaks.last() / even_SL
    is_full_L = np.full(len(replicas_L), problem.fill) | (replicas_L == 0)
    fewest_slots_L = np.where(is_full_L, np.maximum(slots_LD.min(axis=1), 1), 1)
    even = np.maximum(terms[0], terms[1]) * even_SL
    terms[2] = companions(load, peaks, fewest_slots_L, speed_D.max(), even) / even_SL
    alone_SLE = load.each(load.shares_SLE, 1)
    for row in np.flatnonzero(replicas_L == 0):
        loads_SE = alone_SLE[:, row]
        terms[3, :, row] = crowded(loads_SE, slots_LD[row], speed_D) / even_SL[:, row]
    if problem.grouping is not None:
        terms[4] = _groups(problem, alone_SLE, speed_D) / even_SL
    return Bound(by_SL=terms.max(axis=0), term_SL=terms.argmax(axis=0))


def _most_copies(problem: PlacementProblem) -> int:
    """Devices that an expert may be on."""
    grouping = problem.grouping
    nodes_D = [device.node for device in problem.devices.devices]
    if grouping is None:
        return len(nodes_D)
    return int(np.sort(np.bincount(nodes_D))[::-1][: grouping.max_nodes_per_group].sum())


def _groups(problem: PlacementProblem, alone_SLE: Floats, speed_D: Floats) -> Floats:
    """[S, L]: a group's load over its nodes; and where each has one node, groups that meet."""
    grouping = problem.grouping
    assert grouping is not None, "there are no groups"
    num_scenarios, num_layers, _ = alone_SLE.shape
    loads_SLG = alone_SLE.reshape(num_scenarios, num_layers, grouping.num_groups, -1).sum(axis=3)
    nodes_D = np.array([device.node for device in problem.devices.devices])
    speed_M: Floats = np.bincount(nodes_D, speed_D).astype(np.float64)
    fastest = np.sort(speed_M)[::-1][: grouping.max_nodes_per_group].sum()
    most_SL = loads_SLG.max(axis=2) / fastest
    if grouping.max_nodes_per_group > 1:
        return np.asarray(most_SL)
    slots_D = [device.num_slots for device in problem.devices.devices]
    group_size = problem.loads.num_experts // grouping.num_groups
    places_M = (np.bincount(nodes_D, slots_D) // group_size).astype(np.int64)
    places_M = np.maximum(places_M, 1)
    for row in range(num_layers):
        meet_S = crowded(loads_SLG[:, row], places_M, speed_M)
        most_SL[:, row] = np.maximum(most_SL[:, row], meet_S)
    return np.asarray(most_SL)
