"""A lower bound that no plan can beat, from counting alone: for every layer and scenario the
largest of

    mean          the even share of all load
    copies        an expert has at most as many copies as there are free slots and devices
    companions    if all slots are used, the hottest copy shares its device with other copies, at
                  best with the coldest
    crowding      without replicas, hot experts cannot all be alone on a device, nor all with the
                  coldest
    groups        a group of experts restricted to few nodes puts its load there

Pins and a budget of moves only make plans worse, so the bound holds with them too. S scenarios, L
layers, E experts, D devices; loads in units of the even load.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.copies import CopyLoad
from experts.placement.problem.problem import PlacementProblem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
TERMS = ("mean", "copies", "companions", "crowding", "groups")
_BECAUSE = {
    "mean": "the mean load of a device",
    "copies": "the hottest expert over as many copies as it can have",
    "companions": "the hottest copy with the coldest experts beside it",
    "crowding": "hot experts that cannot all lie with cold ones",
    "groups": "a group of experts on its nodes",
}
_PRICES = 2.0 ** -np.arange(1, 9)  # prices of a replica, in loads of the heaviest companion


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The lower bound of every scenario and layer, in units of the even load: at least 1 for
    `tokens`."""

    by_SL: Floats
    term_SL: NDArray[np.int64]  # index in TERMS of the largest term

    @property
    def value(self) -> float:
        """Lower bound of the objective."""
        return float(self.by_SL.mean())

    @property
    def proof(self) -> str:
        """One line that says in how many layers each term is the largest."""
        num_cells = self.term_SL.size
        counts = np.bincount(self.term_SL.ravel(), minlength=len(TERMS))
        parts = [
            f"{_BECAUSE[TERMS[index]]} ({counts[index]} of {num_cells})"
            for index in np.argsort(-counts, kind="stable")
            if counts[index]
        ]
        return (
            f" No plan can have a lower peak than this, by layer and scenario: {'; '.join(parts)}."
        )


def lower_bound(problem: PlacementProblem) -> Bound:
    """Computes the bound in milliseconds. Every (layer, scenario) is bounded separately, so their
    mean bounds the objective."""
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
    """Returns the number of devices that may hold one expert."""
    grouping = problem.grouping
    nodes_D = [device.node for device in problem.devices.devices]
    if grouping is None:
        return len(nodes_D)
    return int(np.sort(np.bincount(nodes_D))[::-1][: grouping.max_nodes_per_group].sum())


def _groups(problem: PlacementProblem, alone_SLE: Floats, speed_D: Floats) -> Floats:
    """Returns [S, L]: the load of a group over its nodes; if each group has one node, also that of
    groups that must share a node."""
    grouping = problem.grouping
    assert grouping is not None, "the problem has no groups"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FewestPeaks:
    """The least weight of the heaviest copy for every number of replicas. Each replica goes to the
    expert that is heaviest so far, which is optimal.

    `peak_HSL[h]` is that weight, over its device's speed, with h replicas (or all that a layer has,
    if these are fewer). Replica h + 1 goes to `expert_HSL[h]`, or to none (-1) if it could not
    help. An expert's r copies are on r devices, so one of them is no faster than the r-th fastest.
    """

    peak_HSL: Floats
    expert_HSL: Ints
    replicas_L: Ints
    num_experts: int

    @classmethod
    def of(cls, load: CopyLoad, speed_D: Floats, replicas_L: Ints, most_copies: int) -> FewestPeaks:
        """Computes the peaks. `speed_D` is descending; an expert may have at most `most_copies`."""
        shape = load.shares_SLE.shape
        rows_SL = np.ix_(range(shape[0]), range(shape[1]))
        num_steps = int(replicas_L.max(initial=0))
        copies_SLE = np.ones(shape, dtype=np.int64)
        heaviest_SLE = load.each(load.shares_SLE, 1) / speed_D[0]
        peak_HSL = np.empty((num_steps + 1, *shape[:2]))
        expert_HSL = np.full((num_steps + 1, *shape[:2]), -1, dtype=np.int64)
        for step in range(num_steps + 1):
            expert_SL = heaviest_SLE.argmax(axis=2)
            index = (*rows_SL, expert_SL)
            peak_HSL[step] = heaviest_SLE[index]
            more_SL = (copies_SLE[index] < most_copies) & (step < replicas_L)
            expert_HSL[step][more_SL] = expert_SL[more_SL]
            copies_SLE[index] += more_SL
            each_SL = load.each(load.shares_SLE[index], copies_SLE[index])
            # More copies may be on slower devices; this bound lets an expert leave some of them
            # unused.
            over_speed_SL = each_SL / speed_D[copies_SLE[index] - 1]
            heaviest_SLE[index] = np.minimum(heaviest_SLE[index], over_speed_SL)
        return cls(
            peak_HSL=peak_HSL,
            expert_HSL=expert_HSL,
            replicas_L=replicas_L,
            num_experts=shape[2],
        )

    def last(self) -> Floats:
        """Returns [S, L]: the peak with all replicas of a layer."""
        return np.asarray(self.peak_HSL[-1])

    def copies(self, num_replicas: int, scenario: int, row: int) -> Ints:
        """Returns [E]: copies of each expert with `num_replicas` replicas."""
        experts_H = self.expert_HSL[:num_replicas, scenario, row]
        return 1 + np.bincount(experts_H[experts_H >= 0], minlength=self.num_experts)


def companions(
    load: CopyLoad, peaks: FewestPeaks, slots_L: Ints, fastest: float, known_SL: Floats
) -> Floats:
    """Returns [S, L]: if every slot is used, a bound from the heaviest copy and the copies beside
    it. It is the least over h, the number of replicas that hot experts get, of the heaviest copy
    with h plus the `slots_L` - 1 lightest copies of distinct experts that the other replicas can
    make.

    Zero where the bound is not above `known_SL`. Proof: let x be a plan's heaviest copy. Making all
    copies at most as heavy as x takes at least the h replicas with which x is the least peak, so
    the other experts share the remaining replicas; and slots - 1 copies of other experts are beside
    x.
    """
    result_SL = np.zeros_like(known_SL)
    hopeful_SL = _at_most(load, peaks, slots_L, fastest) > known_SL * (1 + 1e-9)
    for scenario, row in np.argwhere(hopeful_SL).tolist():
        least = np.inf
        for hot in range(int(peaks.replicas_L[row]), -1, -1):
            peak = float(peaks.peak_HSL[hot, scenario, row])
            if peak >= least:
                break  # fewer replicas for hot experts only raise the peak
            shares_E = load.shares_SLE[scenario, row]
            copies_E = peaks.copies(hot, scenario, row)
            spare = int(peaks.replicas_L[row]) - int(copies_E.sum() - len(copies_E))
            beside = _lightest(load, shares_E, copies_E, int(slots_L[row]) - 1, spare)
            least = min(least, peak + beside / fastest)
        result_SL[scenario, row] = least
    return result_SL


def _at_most(load: CopyLoad, peaks: FewestPeaks, slots_L: Ints, fastest: float) -> Floats:
    """Returns [S, L]: an upper bound of the sum, as if all replicas went to hot experts and
    companions had none."""
    alone_SLE = np.sort(load.each(load.shares_SLE, 1), axis=2)
    beside_SLE = np.pad(np.cumsum(alone_SLE, axis=2), ((0, 0), (0, 0), (1, 0)))
    rows_L = np.arange(len(slots_L))
    return np.asarray(peaks.last() + beside_SLE[:, rows_L, slots_L - 1] / fastest)


def _lightest(load: CopyLoad, shares_E: Floats, copies_E: Ints, count: int, spare: int) -> float:
    """Returns a lower bound of the sum of `count` copies of distinct experts that have `copies_E`
    and share `spare` more.

    Each replica costs a price, and the price of all spare ones is subtracted at the end; any price
    gives a valid bound.
    """
    if count == 0:
        return 0.0
    alone = float(np.partition(load.each(shares_E, copies_E), count - 1)[:count].sum())
    if spare == 0:
        return alone
    more_J = np.arange(spare + 1)
    each_EJ = load.each(shares_E[:, None], copies_E[:, None] + more_J)
    heaviest = float(np.partition(each_EJ[:, 0], count - 1)[count - 1])
    most = 0.0
    for price in _PRICES * heaviest:
        priced_E = (each_EJ + price * more_J).min(axis=1)
        most = max(most, float(np.partition(priced_E, count - 1)[:count].sum()) - price * spare)
    return most


def crowded(loads_Sn: Floats, slots_m: Ints, speed_m: Floats) -> Floats:
    """Returns [S]: a lower bound of the largest load over speed of any place, if every thing is in
    one place: hot things cannot all be alone, nor all with the coldest."""
    down_Sn = -np.sort(-loads_Sn, axis=1)
    together_S = _pigeonholes(down_Sn, slots_m) / speed_m.max()
    return np.asarray(np.maximum(together_S, _apart_or_together(down_Sn, slots_m, speed_m)))


def _pigeonholes(down_Sn: Floats, slots_m: Ints) -> Floats:
    """Bounds by the pigeonhole principle: k + 1 of the m k + 1 hottest things share a place. At
    best these are the coldest of them; if a place has more slots and all are used, the very coldest
    things fill it.

    Worked example, loads 5, 4, 3, 2 in 2 places of 2: two of the hottest three meet, 4 + 3 = 7.
    """
    num_places, num_things = len(slots_m), down_Sn.shape[1]
    beside = _fewest(down_Sn, slots_m)
    most_S = np.zeros(len(down_Sn))
    for k in range(1, int(slots_m.max())):
        if num_places * k >= num_things:
            break
        together_S = down_Sn[:, num_places * k - k : num_places * k + 1].sum(axis=1)
        most_S = np.maximum(most_S, together_S + _coldest(down_Sn, beside - k - 1))
    return most_S


def _apart_or_together(down_Sn: Floats, slots_m: Ints, speed_m: Floats) -> Floats:
    """For every i: either two of the i hottest things share a place, or they are in i places whose
    other slots hold at least the coldest things.

    If all places have two slots, one of the i hottest things is then together with the i-th coldest
    or a hotter one. Worked example, loads 5, 4, 3, 2 in 2 places of 2: 5 with 2 at best, or 4 with
    3: 7.
    """
    beside = _fewest(down_Sn, slots_m)
    is_full = slots_m.sum() == down_Sn.shape[1]
    others_m = np.cumsum(np.sort(slots_m[slots_m > 0]) - 1)
    fastest_m = np.cumsum(-np.sort(-speed_m))
    most_S = np.zeros(len(down_Sn))
    for i in range(1, min(len(others_m), down_Sn.shape[1]) + 1):
        apart_S = down_Sn[:, :i].sum(axis=1)
        if is_full:
            apart_S = apart_S + _coldest(down_Sn, int(others_m[i - 1]))
        apart_S = apart_S / fastest_m[i - 1]
        if is_full and (slots_m == 2).all():
            apart_S = np.maximum(apart_S, (down_Sn[:, i - 1] + down_Sn[:, -i]) / speed_m.max())
        if i > 1:
            pair_S = down_Sn[:, i - 2] + down_Sn[:, i - 1] + _coldest(down_Sn, beside - 2)
            apart_S = np.minimum(apart_S, pair_S / speed_m.max())
        most_S = np.maximum(most_S, apart_S)
    return most_S


def _fewest(down_Sn: Floats, slots_m: Ints) -> int:
    """Smallest number of things in a place that has slots."""
    is_full = slots_m.sum() == down_Sn.shape[1]
    return int(slots_m[slots_m > 0].min()) if is_full else 0


def _coldest(down_Sn: Floats, count: int) -> Floats:
    return np.asarray(down_Sn[:, down_Sn.shape[1] - max(0, count) :].sum(axis=1))
