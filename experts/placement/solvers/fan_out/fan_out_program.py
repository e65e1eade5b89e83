"""The integer program of a layer's fan-out, with the neighbouring layers fixed.

    x[c, d]  1: copy c is on device d          z[m, g]  1: tokens of set m use group g
    q        1: keep the known plan, whose cost is in the objective

    least  nodes * sum weight[m] z[m, node]  +  devices * sum weight[m] z[m, device]
           +  pairs * sum crossing[c, node of d] x[c, d]  +  known * q
    sum_d x[c, d] + q = 1       z[m, node] >= sum of x[c, d] on the node, for every c of m
    sum_c x[c, d] = slots[d] (1 - q), two copies of an expert apart, loads under the caps

S scenarios, C copies, D devices, M sets of tokens' choices, N nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experts.placement.solvers.fan_out.layer_copies import LayerCopies
from experts.placement.solvers.fan_out.layer_cost import Bins, CostWeights, TokenSets
from experts.placement.solvers.ilp.highs import Rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
        """Add z of all sets and groups; returns their costs."""
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
        """Return the device of each copy; None means that the known plan is kept."""
        if x[self._q[0]] > 0.5:
            return None
        return np.asarray(x[self._x_CD].argmax(axis=1), dtype=np.int64)
