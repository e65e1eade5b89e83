"""The choices of tokens in one layer, with equal choices counted once.

N tokens, K choices, M distinct sets of choices, C copies of experts, G groups (devices or nodes).
"""

from __future__ import annotations

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
        """Return the distinct groups of a token's copies, mean over tokens."""
        sorted_MK = np.sort(group_C[self.copies_MK], axis=1)
        num_M = 1 + (sorted_MK[:, 1:] != sorted_MK[:, :-1]).sum(axis=1)
        return float(num_M @ self.weights_M)

    def swap_changes(self, group_C: Ints, num_groups: int) -> Floats:
        """Return the change of `groups_per_token` when copies a and b swap places; 0 within a
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
    """Return the distinct rows, and how often each occurs."""
    top_k = sorted_NK.shape[1]
    if top_k * np.log2(max(2, num_copies)) < 62:  # a row fits into one number
        powers_K = num_copies ** np.arange(top_k, dtype=np.int64)
        _, first_M, counts_M = np.unique(
            sorted_NK @ powers_K, return_index=True, return_counts=True
        )
    else:
        _, first_M, counts_M = np.unique(sorted_NK, axis=0, return_index=True, return_counts=True)
    return first_M, counts_M
