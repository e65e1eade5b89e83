"""An expert's rows over its copies, so that ranks get equal numbers of rows.

T rows, K choices per row, E experts, R ranks. In prefill a rank's time is that of multiplying its
rows; weights are loaded once for many of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class LeastTokens:
    """Experts with fewest copies choose first, of these the one with most rows; each pours its rows
    over its copies until these are level.

    The first rows of an expert go to the copy that its placement names first. Whoever has the same
    rows chooses the same.
    """

    def __init__(self, ranks_of: Sequence[Sequence[int]]) -> None:
        """`ranks_of[expert]`: the ranks that hold it; none: it is never chosen."""
        self._num_ranks = 1 + max((rank for ranks in ranks_of for rank in ranks), default=0)
        self._ranks_of = [tuple(ranks) for ranks in ranks_of]
        self._first_E = np.array([ranks[0] if ranks else -1 for ranks in ranks_of], dtype=np.int64)

    def ranks(self, expert_ids_TK: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rank of each choice [T, K]; -1 for a choice of -1.

        Worked example, expert 0 on rank 0 alone with 4 rows, expert 1 on ranks 0 and 1 with 6: rank
        0 begins with 4, so one row of expert 1 goes there and five to rank 1: 5 and 5.
        """
        flat_N = expert_ids_TK.reshape(-1)
        counts_E = np.bincount(flat_N + 1, minlength=len(self._first_E) + 1)[1:]
        rank_N = np.append(self._first_E, -1)[flat_N]
        is_shared = [len(ranks) > 1 and counts_E[e] > 0 for e, ranks in enumerate(self._ranks_of)]
        single_E = counts_E * ~np.array(is_shared) * (self._first_E >= 0)
        loads = np.bincount(self._first_E.clip(0), single_E, minlength=self._num_ranks)
        shared = np.flatnonzero(is_shared).tolist()
        for expert in sorted(shared, key=lambda e: (len(self._ranks_of[e]), -counts_E[e], e)):
            ranks = np.array(self._ranks_of[expert])
            quotas = poured(loads[ranks], int(counts_E[expert]))
            loads[ranks] += quotas
            rank_N[flat_N == expert] = np.repeat(ranks, quotas)
        return rank_N.reshape(expert_ids_TK.shape)


def poured(levels: NDArray[np.float64], amount: int) -> NDArray[np.int64]:
    """How much of `amount` each gets, so that the highest level is least; what is over goes to the
    first. Levels [4, 0, 1] and 5: they end at [4, 3, 3], so [0, 3, 2]."""
    order = np.argsort(levels, kind="stable")
    lowest = levels[order]
    # With the n lowest under water, its surface is at (amount + their sum) / n.
    surfaces = (amount + np.cumsum(lowest)) / np.arange(1, len(levels) + 1)
    num_under = int(np.flatnonzero(surfaces > lowest)[-1]) + 1
    quotas = np.zeros(len(levels), dtype=np.int64)
    under = np.sort(order[:num_under])
    quotas[under] = np.floor(surfaces[num_under - 1] - levels[under])
    quotas[under[: amount - int(quotas.sum())]] += 1
    return quotas
