"""Chooses one copy of each expert for a whole micro-batch, so that no rank activates many experts.

T rows, K choices per row, E experts, R ranks. In decode a rank's time is that of loading the
weights of its activated experts, whatever the number of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


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
        """Return the rank of each choice [T, K]; -1 for a choice of -1.

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
