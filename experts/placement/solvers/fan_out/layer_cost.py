"""The cost of a layer's plan, and the change of cost for each swap of two copies. Equal choices of
tokens are counted once.

S scenarios, C copies, D devices, B bins: the devices, or the nodes, whose load is capped. N tokens,
K choices, M distinct sets of choices, or nodes; G groups (devices or nodes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class TokenSets:
    """Sets of copies with the share of tokens that chose each; no token chooses a copy twice."""

    def __init__(self, copies_NK: Ints, num_copies: int) -> None:
        """Worked example: rows [2, 0], [0, 2], [1, 2] are the sets [0, 2] and [1, 2], with shares
        2/3 and 1/3."""
        self._num_copies = num_copies
        sorted_NK = np.sort(copies_NK, axis=1)
        first_M, counts_M = _distinct(sorted_NK, num_copies)
        self.copies_MK, self.weights_M = sorted_NK[first_M], counts_M / len(sorted_NK)
        num_sets, top_k = self.copies_MK.shape
        self._set_M1 = np.arange(num_sets)[:, None]
        # For every two choices of a set, the cell [copy, copy] in which they count.
        self._cells = (self.copies_MK[:, :, None] * num_copies + self.copies_MK[:, None]).ravel()
        self._shape = (num_sets, top_k, top_k)

    def groups_per_token(self, group_C: Ints) -> float:
        """Returns the distinct groups of a token's copies, mean over tokens."""
        sorted_MK = np.sort(group_C[self.copies_MK], axis=1)
        num_M = 1 + (sorted_MK[:, 1:] != sorted_MK[:, :-1]).sum(axis=1)
        return float(num_M @ self.weights_M)

    def swap_changes(self, group_C: Ints, num_groups: int) -> Floats:
        """Returns the change of `groups_per_token` when copies a and b swap places; 0 within a
        group.

        A token with a and not b loses the group of a if a was alone in it, and gains the group of b
        if it had nothing there. A token with both keeps its groups: its loss is added back.
        """
        group_MK = group_C[self.copies_MK]
        cells_MK = group_MK + self._set_M1 * num_groups
        count_MK = np.bincount(cells_MK.ravel())[cells_MK]
        weight_M1 = self.weights_M[:, None]
        lost_CC = self._summed(np.where(count_MK == 1, weight_M1, 0.0)[:, :, None])
        share_CC = self._summed((weight_M1 / count_MK)[:, None, :])
        here_CG = (group_C[:, None] == np.arange(num_groups)).astype(np.float64)
        total_C = np.bincount(
            self.copies_MK.ravel(),
            np.broadcast_to(weight_M1, group_MK.shape).ravel(),
            self._num_copies,
        )
        absent_CG = total_C[:, None] - share_CC @ here_CG
        one_CC = absent_CG[:, group_C] - lost_CC.diagonal()[:, None] + lost_CC
        change_CC = one_CC + one_CC.T
        change_CC[group_C[:, None] == group_C] = 0.0
        return np.asarray(change_CC)

    def _summed(self, of_MKK: Floats) -> Floats:
        """[a, b]: sum over the sets that have both of the value of their choices; shapes
        broadcast."""
        values = np.broadcast_to(of_MKK, self._shape).ravel()
        sums = np.bincount(self._cells, values, self._num_copies**2)
        return np.asarray(sums, dtype=np.float64).reshape(self._num_copies, self._num_copies)


def _distinct(sorted_NK: Ints, num_copies: int) -> tuple[Ints, Ints]:
    """Returns the distinct rows, and how often each occurs."""
    top_k = sorted_NK.shape[1]
    if top_k * np.log2(max(2, num_copies)) < 62:  # a row fits into one number
        powers_K = num_copies ** np.arange(top_k, dtype=np.int64)
        _, first_M, counts_M = np.unique(
            sorted_NK @ powers_K, return_index=True, return_counts=True
        )
    else:
        _, first_M, counts_M = np.unique(sorted_NK, axis=0, return_index=True, return_counts=True)
    return first_M, counts_M


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWeights:
    """Weights of the parts of a layer's cost."""

    nodes: float = 1.0  # per distinct node of a token
    pairs: float = 1.0  # per share of pairs with a neighbouring layer that cross nodes
    devices: float = 0.05  # per distinct device of a token
    spread: float = 0.2  # per squared difference of a bin's load from the even load, summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """The bins in which loads are summed and capped."""

    bin_D: Ints
    speeds_B: Floats
    caps_S: Floats  # caps on a bin's load over its speed; 1 is the even load


class LayerCost:
    """The cost of a layer, as a mean over tokens. `crossing_CM` is the cost of a copy's position
    relative to the neighbouring layers, which is constant while the layer is searched."""

    def __init__(
        self,
        sets: TokenSets,
        loads_SC: Floats,
        node_D: Ints,
        bins: Bins,
        weights: CostWeights,
        crossing_CM: Floats,
    ) -> None:
        self._sets, self._loads_SC, self._node_D, self._bins = sets, loads_SC, node_D, bins
        self._weights, self._crossing_CM = weights, crossing_CM

    def cost(self, device_C: Ints) -> float:
        """Returns the cost, without the cap."""
        weights, node_C = self._weights, self._node_D[device_C]
        total = weights.pairs * float(self._crossing_CM[np.arange(len(node_C)), node_C].sum())
        if weights.nodes:
            total += weights.nodes * self._sets.groups_per_token(node_C)
        if weights.devices:
            total += weights.devices * self._sets.groups_per_token(device_C)
        off_SB = self._filled(device_C) - 1.0
        return total + weights.spread * float(np.square(off_SB).sum(axis=1).mean())

    def changes(self, device_C: Ints) -> Floats:
        """[a, b]: change of the cost if copies a and b swap places."""
        weights, node_C = self._weights, self._node_D[device_C]
        here_C = self._crossing_CM[np.arange(len(node_C)), node_C]
        one_CC = weights.pairs * (self._crossing_CM[:, node_C] - here_C[:, None])
        if weights.spread:
            one_CC += weights.spread * self._spread_changes(device_C)
        change_CC = one_CC + one_CC.T
        if weights.nodes:
            num_nodes = self._crossing_CM.shape[1]
            change_CC += weights.nodes * self._sets.swap_changes(node_C, num_nodes)
        if weights.devices:
            num_devices = len(self._node_D)
            change_CC += weights.devices * self._sets.swap_changes(device_C, num_devices)
        return np.asarray(change_CC)

    def overload(self, device_C: Ints) -> float:
        """Returns the load above the caps, summed over bins and scenarios."""
        return float(self._over(self._filled(device_C)).sum())

    def overload_changes(self, device_C: Ints) -> Floats:
        """[a, b]: change of the overload if copies a and b swap places."""
        bin_C = self._bins.bin_D[device_C]
        filled_SB = self._filled(device_C)
        over_SB = self._over(filled_SB)
        change_CC = np.zeros((len(bin_C), len(bin_C)))
        for index, loads_C in enumerate(self._loads_SC):
            more_CC = (loads_C - loads_C[:, None]) / self._bins.speeds_B[bin_C][:, None]
            after_CC = filled_SB[index, bin_C][:, None] + more_CC - self._bins.caps_S[index]
            one_CC = np.maximum(0.0, after_CC) - over_SB[index, bin_C][:, None]
            change_CC += one_CC + one_CC.T
        change_CC[bin_C[:, None] == bin_C] = 0.0
        return change_CC

    def _spread_changes(self, device_C: Ints) -> Floats:
        """[a, b]: change of the spread of a's bin if b replaces a."""
        bin_C = self._bins.bin_D[device_C]
        off_SB = self._filled(device_C) - 1.0
        change_CC = np.zeros((len(bin_C), len(bin_C)))
        for loads_C, off_B in zip(self._loads_SC, off_SB, strict=True):
            more_CC = (loads_C - loads_C[:, None]) / self._bins.speeds_B[bin_C][:, None]
            change_CC += more_CC * (more_CC + 2.0 * off_B[bin_C][:, None])
        change_CC[bin_C[:, None] == bin_C] = 0.0
        return np.asarray(change_CC / len(self._loads_SC))

    def _filled(self, device_C: Ints) -> Floats:
        """Loads of bins over their speeds."""
        bin_C, num_bins = self._bins.bin_D[device_C], len(self._bins.speeds_B)
        loads = [np.bincount(bin_C, loads_C, num_bins) for loads_C in self._loads_SC]
        return np.asarray(np.array(loads) / self._bins.speeds_B)

    def _over(self, filled_SB: Floats) -> Floats:
        return np.asarray(np.maximum(0.0, filled_SB - self._bins.caps_S[:, None]))
