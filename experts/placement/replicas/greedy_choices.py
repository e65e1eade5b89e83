"""Chooses copies greedily: for even numbers of rows, or for few activated experts.

T rows, K choices per row, E experts, R ranks. In prefill a rank's time is that of multiplying its
rows, because weights are loaded once for many of them: `LeastTokens`. In decode it is that of
loading the weights of its activated experts, whatever the number of their rows: `FewestActivated`.
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
        """Returns the rank of each choice [T, K]; -1 for a choice of -1.

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
    """Divides `amount` so that the highest level is least; a remainder goes to the first that get
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


class FewestActivated:
    """Lets the experts with fewest copies choose first; each takes the rank with the fewest
    activated experts so far.

    Ties go to the lower expert and to the copy that the placement names first. All ranks with the
    same rows therefore make the same choice without communicating.
    """

    def __init__(self, ranks_of: Sequence[Sequence[int]]) -> None:
        """`ranks_of[expert]` lists the ranks that hold it; an expert without ranks is never
        chosen."""
        self._num_ranks = 1 + max((rank for ranks in ranks_of for rank in ranks), default=0)
        self._single_E = np.array([ranks[0] if ranks else -1 for ranks in ranks_of], dtype=np.int64)
        by_copies = sorted((len(ranks), e) for e, ranks in enumerate(ranks_of) if len(ranks) > 1)
        self._replicated = [(expert, tuple(ranks_of[expert])) for _, expert in by_copies]
        self._is_single_E = np.array([len(ranks) == 1 for ranks in ranks_of])

    def ranks(self, expert_ids_TK: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rank of each choice [T, K]; -1 for a choice of -1.

        Worked example, experts 0 and 1 on rank 0 alone, 2 on 0 or 1, 3 on 0 or 1, all activated:
        rank 0 begins with two, so 2 goes to rank 1, and 3 too, with 2 and 2 in the end.
        """
        num_experts = len(self._single_E)
        is_activated_E = np.zeros(num_experts + 1, dtype=bool)
        is_activated_E[expert_ids_TK] = True  # id -1 indexes the last entry
        singles = self._single_E[is_activated_E[:-1] & self._is_single_E]
        loads = np.bincount(singles, minlength=self._num_ranks).tolist()
        rank_E = np.append(self._single_E, -1)
        activated = is_activated_E.tolist()
        for expert, ranks in self._replicated:
            if activated[expert]:
                rank = min(ranks, key=loads.__getitem__)
                rank_E[expert] = rank
                loads[rank] += 1
        return rank_E[expert_ids_TK]
