"""Searches one layer: assigns copies to nodes, then to devices of their node, then swaps any two
that still help.

The last is a tabu search: it makes the best swap again and again, past local optima, and above a
cap for a while. The first two are one integer program, with the neighbouring layers fixed:

    x[c, d]  1: copy c is on device d          z[m, g]  1: tokens of set m use group g
    q        1: keep the known plan, whose cost is in the objective

    least  nodes * sum weight[m] z[m, node]  +  devices * sum weight[m] z[m, device]
           +  pairs * sum crossing[c, node of d] x[c, d]  +  known * q
    sum_d x[c, d] + q = 1       z[m, node] >= sum of x[c, d] on the node, for every c of m
    sum_c x[c, d] = slots[d] (1 - q), two copies of an expert apart, loads under the caps

S scenarios, C copies, D devices, M sets of tokens' choices (in the program) or nodes (in the
search), N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experts.placement.solvers.fan_out.layer_copies import LayerCopies, LayerLimits
from experts.placement.solvers.fan_out.layer_cost import Bins, CostWeights, LayerCost, TokenSets
from experts.placement.solvers.ilp.highs import Rows, run_highs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_EPSILON = 1e-9
_STILL = 6  # swaps during which copies that just moved stay where they are
_PRICE = 4.0  # initial price of a load over the cap
_OSCILLATION = 4  # swaps over or under the cap, after which the price rises or falls
_EPSILON, _TOLERANCE = 1e-9, 1e-6  # rounding errors of sums here, and of HiGHS
# limit on an exact program; 120 sets of 2 choices, 2 nodes and 8 devices are 2400
_MOST_ENTRIES = 3_000
_COPIES_PER_PATIENCE = 8  # more copies need more swaps to leave a local optimum
_OVER_CAP = 1e3  # added to the cost of a plan over the cap


class FanOutProgram:
    """Builds the program. Does not support pins, groups, a budget of moves, or the spread of loads
    below the cap."""

    def __init__(
        self,
        copies: LayerCopies,
        sets: TokenSets,
        bins: Bins,
        node_D: Ints,
        weights: CostWeights,
        crossing_CM: Floats,
        known: float,
    ) -> None:
        """`bins` are the devices; `known` is the cost of a known plan, with the same weights."""
        self.rows = Rows()
        num_copies, num_devices = len(copies.expert_C), len(node_D)
        self._x_CD = np.arange(num_copies * num_devices).reshape(num_copies, num_devices)
        self._q = np.array([self._x_CD.size])
        parts = [weights.pairs * crossing_CM[:, node_D].ravel(), np.array([known])]
        self._add_places(copies, bins)
        self._add_order(copies, bins, node_D)
        self._num_variables = self._x_CD.size + 1
        parts += self._add_groups(sets, node_D, weights.nodes)
        if weights.devices:
            parts += self._add_groups(sets, np.arange(num_devices), weights.devices)
        self.cost = np.concatenate(parts)
        self.upper = np.ones(len(self.cost))
        self.is_integer = np.zeros(len(self.cost))  # z need not be integer, because x determines it
        self.is_integer[: self._x_CD.size + 1] = 1

    def _add_places(self, copies: LayerCopies, bins: Bins) -> None:
        slots_D = np.bincount(copies.device_C, minlength=self._x_CD.shape[1])
        for x_D in self._x_CD:
            self.rows.add([(x_D, 1), (self._q, 1)], 1, 1)
        for x_C, slots in zip(self._x_CD.T, slots_D.tolist(), strict=True):
            self.rows.add([(x_C, 1), (self._q, slots)], slots, slots)
        for expert in np.flatnonzero(np.bincount(copies.expert_C[copies.expert_C >= 0]) > 1):
            for x_c in self._x_CD[copies.expert_C == expert].T:
                self.rows.add([(x_c, 1)], 0, 1)
        for loads_C, cap in zip(copies.loads_SC, bins.caps_S.tolist(), strict=True):
            for x_C, speed in zip(self._x_CD.T, bins.speeds_B.tolist(), strict=True):
                self.rows.add([(x_C, loads_C)], -np.inf, cap * speed)

    def _add_order(self, copies: LayerCopies, bins: Bins, node_D: Ints) -> None:
        """Break the symmetry of equal devices on a node: a device holds a copy only if the one
        before it holds an earlier one. Of all plans that differ only by device names, one
        remains."""
        slots_D = np.bincount(copies.device_C, minlength=len(node_D))
        kinds: dict[tuple[int, int, float], int] = {}
        for device, node in enumerate(node_D.tolist()):
            kind = (node, int(slots_D[device]), float(bins.speeds_B[device]))
            before = kinds.get(kind)
            kinds[kind] = device
            if before is None:
                continue
            for copy in range(len(self._x_CD)):
                earlier = self._x_CD[: copy + 1, before]
                self.rows.add([(self._x_CD[copy, [device]], 1), (earlier, -1)], -np.inf, 0)

    def _add_groups(self, sets: TokenSets, group_D: Ints, weight: float) -> list[Floats]:
        """Adds z of all sets and groups; returns their costs."""
        num_groups = int(group_D.max()) + 1
        num_sets = len(sets.weights_M)
        z_MG = self._num_variables + np.arange(num_sets * num_groups).reshape(num_sets, num_groups)
        self._num_variables += z_MG.size
        for group in range(num_groups):
            here_D = np.flatnonzero(group_D == group)
            for z, copies_K in zip(z_MG[:, group].tolist(), sets.copies_MK.tolist(), strict=True):
                for copy in copies_K:
                    terms = [(self._x_CD[copy, here_D], 1.0), (np.array([z]), -1.0)]
                    self.rows.add(terms, -np.inf, 0.0)
        return [weight * np.repeat(sets.weights_M, num_groups)]

    def plan_of(self, x: Floats) -> Ints | None:
        """Returns the device of each copy; None means that the known plan is kept."""
        if x[self._q[0]] > 0.5:
            return None
        return np.asarray(x[self._x_CD].argmax(axis=1), dtype=np.int64)


def best_swaps(
    cost_of: LayerCost,
    device_C: NDArray[np.int64],
    is_legal_CC: Callable[[NDArray[np.int64]], NDArray[np.bool_]],
    patience: int,
    goes_on: Callable[[], bool],
) -> NDArray[np.int64]:
    """Returns the cheapest plan under the cap that was found, or the one least above it. Ends after
    `patience` swaps without a better one. `is_legal_CC` says which two copies may swap."""
    device_C = device_C.copy()
    cost, overload = cost_of.cost(device_C), cost_of.overload(device_C)
    best_C, best = device_C.copy(), (_over(overload), cost)
    still_until_C = np.zeros(len(device_C), dtype=np.int64)
    price, num_over, num_under, since_best, turn = _PRICE, 0, 0, 0, 0
    while since_best < patience and goes_on():
        change_CC, over_CC = cost_of.changes(device_C), cost_of.overload_changes(device_C)
        is_still_C = still_until_C > turn
        is_best_CC = (overload + over_CC <= _EPSILON) & (
            (cost + change_CC < best[1] - _EPSILON) | (best[0] > 0)
        )
        is_allowed_CC = is_best_CC | ~(is_still_C[:, None] | is_still_C)
        is_allowed_CC &= is_legal_CC(device_C)
        score_CC = np.where(is_allowed_CC, change_CC + price * over_CC, np.inf)
        first, second = divmod(int(score_CC.argmin()), len(device_C))
        if not np.isfinite(score_CC[first, second]):
            break
        cost += float(change_CC[first, second])
        overload = max(0.0, overload + float(over_CC[first, second]))
        device_C[[first, second]] = device_C[[second, first]]
        still_until_C[[first, second]] = turn + 1 + _STILL
        is_under = overload <= _EPSILON
        num_over, num_under = (0, num_under + 1) if is_under else (num_over + 1, 0)
        if max(num_over, num_under) >= _OSCILLATION:
            price *= 0.5 if is_under else 2.0
            num_over = num_under = 0
        turn, since_best = turn + 1, since_best + 1
        if _is_better((_over(overload), cost), best):
            best_C, best, since_best = device_C.copy(), (_over(overload), cost), 0
    return np.asarray(best_C)


def _over(overload: float) -> float:
    """Returns the overload, 0 if it is only rounding."""
    return overload if overload > _EPSILON else 0.0


def _is_better(one: tuple[float, float], best: tuple[float, float]) -> bool:
    """Returns whether (overload, cost) is better by more than rounding."""
    lighter = best[0] - one[0]
    return lighter > _EPSILON or (abs(lighter) <= _EPSILON and one[1] < best[1] - _EPSILON)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """The result of a layer's integer program."""

    device_C: Ints
    is_proved: bool  # no plan is cheaper while the neighbouring layers stay as they are


class LayerSearch:
    """Searches a layer. First the loads of nodes are capped, which leaves more freedom than capping
    devices; then copies are levelled inside each node, at no cost in nodes."""

    def __init__(
        self,
        copies: LayerCopies,
        limits: LayerLimits,
        sets: TokenSets,
        speeds_D: Floats,
        caps_S: Floats,
        weights: CostWeights,
    ) -> None:
        """`caps_S` caps a device's load over its speed, in each scenario."""
        self._copies, self._limits, self._sets, self._weights = copies, limits, sets, weights
        node_D = limits.node_D
        self._num_nodes = int(node_D.max()) + 1
        self._devices = Bins(bin_D=np.arange(len(node_D)), speeds_B=speeds_D, caps_S=caps_S)
        self._nodes = Bins(
            bin_D=node_D, speeds_B=np.bincount(node_D, speeds_D).astype(np.float64), caps_S=caps_S
        )

    def improved(
        self, device_C: Ints, crossing_CM: Floats, patience: int, goes_on: Callable[[], bool]
    ) -> Ints:
        """Returns a plan no more expensive than `device_C`, and under the caps if `device_C` is."""
        patience = max(patience, len(device_C) // _COPIES_PER_PATIENCE)
        whole = self._cost(self._devices, self._weights, crossing_CM)
        by_node = self._cost(self._nodes, replace(self._weights, devices=0.0), crossing_CM)
        inside = self._cost(
            self._devices, replace(self._weights, nodes=0.0, pairs=0.0), crossing_CM
        )
        found_C = best_swaps(by_node, device_C, self._across, patience, goes_on)
        found_C = best_swaps(inside, found_C, self._within, patience, goes_on)
        found_C = best_swaps(whole, found_C, self._limits.is_legal, patience, goes_on)
        is_under = whole.overload(found_C) <= _EPSILON
        is_better = whole.cost(found_C) < whole.cost(device_C) - _EPSILON
        return found_C if is_under and is_better else device_C

    def exact(self, device_C: Ints, crossing_CM: Floats, seconds: float) -> Exact | None:
        """Solves a small layer exactly with HiGHS, with the neighbouring layers fixed; the spread
        of loads below the cap is ignored. Returns None if the layer is too large."""
        weights = replace(self._weights, spread=0.0)
        num_groups = self._num_nodes + len(self._limits.node_D) * bool(weights.devices)
        size = len(self._sets.weights_M) * num_groups * self._sets.copies_MK.shape[1]
        if size > _MOST_ENTRIES or not self._limits.are_none:
            return None
        cost = self._cost(self._devices, weights, crossing_CM)
        known, is_under = cost.cost(device_C), cost.overload(device_C) <= _EPSILON
        program = FanOutProgram(
            self._copies,
            self._sets,
            self._devices,
            self._limits.node_D,
            weights,
            crossing_CM,
            known if is_under else _OVER_CAP,
        )
        found = run_highs(program, seconds)
        plan_C = None if found.x is None else program.plan_of(found.x)
        if plan_C is None or cost.overload(plan_C) > _TOLERANCE:
            plan_C = device_C
        is_better = not is_under or cost.cost(plan_C) < known - _TOLERANCE
        return Exact(device_C=plan_C if is_better else device_C, is_proved=found.is_optimal)

    def nodes_per_token(self, device_C: Ints) -> float:
        """Returns the distinct nodes of a token, mean over tokens."""
        return self._sets.groups_per_token(self._limits.node_D[device_C])

    def _cost(self, bins: Bins, weights: CostWeights, crossing_CM: Floats) -> LayerCost:
        return LayerCost(
            self._sets, self._copies.loads_SC, self._limits.node_D, bins, weights, crossing_CM
        )

    def _across(self, device_C: Ints) -> NDArray[np.bool_]:
        node_C = self._limits.node_D[device_C]
        return np.asarray(self._limits.is_legal(device_C) & (node_C[:, None] != node_C))

    def _within(self, device_C: Ints) -> NDArray[np.bool_]:
        node_C = self._limits.node_D[device_C]
        return np.asarray(self._limits.is_legal(device_C) & (node_C[:, None] == node_C))
