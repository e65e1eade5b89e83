"""Computes the cost of a layer's positions relative to the neighbouring layers: pairs of one token
that cross nodes.

N tokens, K choices of a token, C things with a position (copies, or the bundles of devices), B
those of the neighbouring layer, M nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Neighbours:
    """Shares of pairs between layers; the positions are passed to each call."""

    def __init__(self, chosen: Sequence[NDArray[np.int64]], sizes: Sequence[int]) -> None:
        """Takes, by layer, the things that tokens use [N, K], and the number of things."""
        self._sizes = tuple(sizes)
        self._shares = [
            pair_shares(chosen[index], sizes[index], chosen[index + 1], sizes[index + 1])
            for index in range(len(chosen) - 1)
        ]

    def crossing(
        self, index: int, nodes: Sequence[NDArray[np.int64]], num_nodes: int, *, is_first: bool
    ) -> NDArray[np.float64]:
        """[thing, node]: the share of pairs that cross if the thing is on that node. `nodes` has
        the node of each thing of each layer. In the first sweep the next layer is ignored, because
        it will change."""
        crossing_CM = np.zeros((self._sizes[index], num_nodes))
        if index > 0:
            shares_CB = self._shares[index - 1].T
            crossing_CM += shares_CB @ _is_elsewhere(nodes[index - 1], num_nodes)
        if index + 1 < len(self._sizes) and not is_first:
            crossing_CM += self._shares[index] @ _is_elsewhere(nodes[index + 1], num_nodes)
        return crossing_CM


def pair_shares(
    here_NK: NDArray[np.int64], num_here: int, next_NK: NDArray[np.int64], num_next: int
) -> NDArray[np.float64]:
    """[thing of a layer, thing of the next]: share of all pairs of one token; the shares sum to
    1."""
    count_n = np.zeros(num_here * num_next)
    top_k = here_NK.shape[1]
    for k in range(top_k):
        cells_NK = here_NK * num_next + next_NK[:, k : k + 1]
        count_n += np.bincount(cells_NK.ravel(), minlength=num_here * num_next)
    return np.asarray(count_n.reshape(num_here, num_next) / (here_NK.size * top_k))


def _is_elsewhere(node_B: NDArray[np.int64], num_nodes: int) -> NDArray[np.bool_]:
    return np.asarray(node_B[:, None] != np.arange(num_nodes))
