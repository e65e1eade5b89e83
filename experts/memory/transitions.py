"""How often rows that choose expert e in a layer choose expert f in the next, learnt as they pass.

L layers, E experts, T rows, K choices per row. The layer after the last one is the first: the next
token's, which for a decode step comes from other rows, so nothing is learnt there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MAX_ROWS = 64  # of a visit that are looked at
_MAX_COUNT = 4096.0  # of an expert's rows; beyond, all of its counts are halved
_LEAST_COUNT = 64.0  # rows of a layer before it predicts


class Transitions:
    """Counts [L, E, E] of the choices of rows in consecutive layers.

    Rows are known by their place: a visit of one layer has the rows of the visit before to the
    layer before, in their order. Where numbers of rows differ, nothing is learnt. -1 is no expert.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._counts_LEE = np.zeros((num_layers, num_experts, num_experts), dtype=np.float32)
        self._rows_LE = np.zeros((num_layers, num_experts), dtype=np.float32)
        self._last: tuple[int, NDArray[np.int64]] | None = None

    def visit(self, layer: int, expert_ids_TK: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Learn from a visit -> the probability [E] that the next layer's needs an expert, or None
        as long as too little is known."""
        ids_TK = expert_ids_TK[:_MAX_ROWS]
        last, self._last = self._last, (layer, ids_TK)
        if last is not None and last[0] == layer - 1 and last[1].shape == ids_TK.shape:
            self._learn(last[0], last[1], ids_TK)
        return self._predicted(layer, ids_TK)

    def _learn(
        self, layer: int, ids_TK: NDArray[np.int64], following_TK: NDArray[np.int64]
    ) -> None:
        num_experts = self._rows_LE.shape[1]
        here_TE = _chosen(ids_TK, num_experts)
        self._counts_LEE[layer] += here_TE.T @ _chosen(following_TK, num_experts)
        self._rows_LE[layer] += here_TE.sum(axis=0)
        full_E = self._rows_LE[layer] > _MAX_COUNT
        if full_E.any():
            self._rows_LE[layer, full_E] /= 2
            self._counts_LEE[layer, full_E] /= 2

    def _predicted(self, layer: int, ids_TK: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """A row's probability is the mean of its experts'. A visit needs what one of its rows
        needs."""
        rows_E = self._rows_LE[layer]
        if rows_E.sum() < _LEAST_COUNT * max(1, ids_TK.shape[1]):
            return None
        here_TE = _chosen(ids_TK, len(rows_E))
        share_EE = self._counts_LEE[layer] / np.maximum(rows_E, 1.0)[:, None]
        of_row_TE = here_TE @ share_EE / np.maximum(here_TE.sum(axis=1), 1.0)[:, None]
        needed_E: NDArray[np.float64] = 1.0 - np.prod(1.0 - of_row_TE.astype(np.float64), axis=0)
        return needed_E


def _chosen(ids_TK: NDArray[np.int64], num_experts: int) -> NDArray[np.float32]:
    """[T, E]: 1 where a row chose an expert."""
    chosen = np.zeros((len(ids_TK), num_experts + 1), dtype=np.float32)
    chosen[np.arange(len(ids_TK))[:, None], ids_TK] = 1.0  # -1 is the last
    return chosen[:, :num_experts]
