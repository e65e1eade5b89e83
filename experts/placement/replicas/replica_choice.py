"""Chooses the copy of an expert that serves a row, as a pure function of the layer and the rows'
choices.

n rows, K choices per row, E experts, M the most copies of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from experts.placement.replicas.greedy_choices import FewestActivated, LeastTokens
from experts.placement.replicas.lp_split import LpSplit

ReplicaPolicy = Literal["round-robin", "fewest-activated", "least-tokens", "lp", "auto"]
# rows of an activated expert above which multiplying takes longer than loading its weights
_MANY_ROWS = 16.0


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """Lets copies take turns: row r of expert e goes to copy (r + e + layer) mod (copies of e).

    The rows of one expert spread over its copies, and so do the experts of a single row. The table
    may be used outside of numpy: rank = ranks_EM[e, (r + first_E[e]) % counts_E[e]].
    """

    ranks_EM: NDArray[np.int64]  # padded with -1
    counts_E: NDArray[np.int64]  # 1 for an expert that no rank holds; its rank is -1
    first_E: NDArray[np.int64]  # the turn of row 0

    @classmethod
    def of(cls, layer: int, ranks_of: Sequence[Sequence[int]]) -> ReplicaChoice:
        """Makes the table; `ranks_of[expert]` lists the ranks that hold it."""
        num_experts = len(ranks_of)
        counts_E = np.array([max(1, len(ranks)) for ranks in ranks_of], dtype=np.int64)
        ranks_EM = np.full((num_experts, int(counts_E.max())), -1, dtype=np.int64)
        for expert, ranks in enumerate(ranks_of):
            ranks_EM[expert, : len(ranks)] = ranks
        return cls(ranks_EM, counts_E, np.arange(num_experts, dtype=np.int64) + layer)

    def ranks(
        self, expert_ids_nK: NDArray[np.int64], rows_n: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Returns the rank of each choice [n, K]; -1 for a choice of -1, which is held elsewhere.

        Worked example, layer 0, expert 0 on ranks [0, 1], expert 1 on [2], K = 2, rows 0 and 1 with
        ids [[0, 1], [0, 1]]: [[0, 2], [1, 2]].
        """
        turns_nK = (rows_n[:, None] + self.first_E[expert_ids_nK]) % self.counts_E[expert_ids_nK]
        ranks_nK = self.ranks_EM[expert_ids_nK, turns_nK]
        return np.where(expert_ids_nK < 0, -1, ranks_nK)


class LayerChoice:
    """Chooses the copies of a layer by a policy. `auto` decides by the mean rows of an activated
    expert."""

    def __init__(
        self, policy: ReplicaPolicy, layer: int, ranks_of: Sequence[Sequence[int]]
    ) -> None:
        self._policy = policy
        self._turns = ReplicaChoice.of(layer, ranks_of)
        self._fewest, self._least = FewestActivated(ranks_of), LeastTokens(ranks_of)
        self._split = LpSplit(ranks_of)

    def ranks(self, expert_ids_TK: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rank of each choice [T, K] of a micro-batch; -1 for a choice of -1."""
        policy = self._policy
        if policy == "auto":
            num_activated = len(np.unique(expert_ids_TK[expert_ids_TK >= 0]))
            is_many = expert_ids_TK.size >= _MANY_ROWS * num_activated
            policy = "lp" if is_many else "fewest-activated"
        if policy == "fewest-activated":
            return self._fewest.ranks(expert_ids_TK)
        if policy == "least-tokens":
            return self._least.ranks(expert_ids_TK)
        if policy == "lp":
            return self._split.ranks(expert_ids_TK)
        return self._turns.ranks(expert_ids_TK, np.arange(len(expert_ids_TK)))
