"""Spreads an expert's rows over its copies, so that ranks get equal numbers of rows.

T rows, K choices per row, E experts, R ranks. In prefill a rank's time is that of multiplying its
rows; weights are loaded once for many of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class LeastTokens:
    """Lets the experts with fewest copies choose first, and among these the one with most rows.
    Each pours its rows over its copies until their ranks are level.

    The first rows of an expert go to the copy that its placement names first. All ranks with the
    same rows make the same choice.
    """

    def __init__(self, ranks_of: Sequence[Sequence[int]]) -> None:
        """`ranks_of[expert]` lists the ranks that hold it; an expert without ranks is never
        chosen."""
        self._num_ranks = 1 + max((rank for ranks in ranks_of for rank in ranks), default=0)
        self._ranks_of = [tuple(ranks) or (-1,) for ranks in ranks_of]

    def ranks(self, expert_ids_TK: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rank of each choice [T, K]; -1 for a choice of -1.

        Worked example, expert 0 on rank 0 alone with 4 rows, expert 1 on ranks 0 and 1 with 6: rank
        0 begins with 4, so one row of expert 1 goes there and five to rank 1: 5 and 5.
        """
        flat_N = expert_ids_TK.reshape(-1)
        elsewhere, *counts = np.bincount(flat_N + 1, minlength=len(self._ranks_of) + 1).tolist()
        used = [expert for expert, count in enumerate(counts) if count]
        # the last entry is for rank -1
        loads, quotas = [0] * (self._num_ranks + 1), dict[int, list[int]]()
        for expert in sorted(used, key=lambda e: (len(self._ranks_of[e]), -counts[e], e)):
            ranks = self._ranks_of[expert]
            quotas[expert] = poured([loads[rank] for rank in ranks], counts[expert])
            for rank, quota in zip(ranks, quotas[expert], strict=True):
                loads[rank] += quota
        # The choices are sorted by expert: the first quota of an expert's choices goes to its first
        # copy, the next to its second, and so on.
        ranks_in_turn = [-1, *(rank for expert in used for rank in self._ranks_of[expert])]
        repeats = [elsewhere, *(quota for expert in used for quota in quotas[expert])]
        rank_N = np.empty_like(flat_N)
        rank_N[np.argsort(flat_N, kind="stable")] = np.repeat(ranks_in_turn, repeats)
        return rank_N.reshape(expert_ids_TK.shape)


def poured(levels: Sequence[int], amount: int) -> list[int]:
    """Divide `amount` so that the highest level is least; a remainder goes to the first that get
    some. Worked example, levels [4, 0, 1] and amount 5: they end at [4, 3, 3], so [0, 3, 2]."""
    order = sorted(range(len(levels)), key=levels.__getitem__)
    total, num_under = amount, 0
    while num_under < len(order) and levels[order[num_under]] * num_under < total:
        total += levels[order[num_under]]  # one more under water: the surface is total / num_under
        num_under += 1
    under = sorted(order[:num_under])
    surface, over = divmod(total, num_under)
    quotas = [0] * len(levels)
    for place, index in enumerate(under):
        quotas[index] = surface - levels[index] + (place < over)
    return quotas
