"""Which rows go to which expert rank: each row at most once to a rank, whatever it chose there.

T rows, K choices, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.placement.replicas.replica_choice import LayerChoice, ReplicaChoice, ReplicaPolicy
from experts.routed_rows import RoutedRows


@dataclass(frozen=True, slots=True)
class RankRows:
    """What one expert rank gets of a micro-batch. `rows_n` is None when it gets all, in order."""

    rows_n: Tensor | None  # int64 [n], ascending
    x_nD: Tensor
    expert_ids_nK: Tensor  # -1: a choice that another rank serves
    weights_nK: Tensor


class RowSplit:
    """The ranks of each layer's experts, and which copy of one serves a row.

    Copies are chosen on the host, so elsewhere they take turns, whatever the policy.
    """

    def __init__(
        self,
        ranks_of: Mapping[int, Sequence[Sequence[int]]],
        num_ranks: int,
        device: torch.device | None = None,
        policy: ReplicaPolicy = "round-robin",
    ) -> None:
        """`ranks_of[layer][expert]`: the ranks, numbered 0 .. num_ranks - 1, that hold it.
        `device`: of the ids; None: the CPU."""
        self._num_ranks, self._policy = num_ranks, policy
        self._device = device = device or torch.device("cpu")
        self._turns = {layer: _Turns.of(layer, each, device) for layer, each in ranks_of.items()}
        is_choosing = policy != "round-robin" and device.type == "cpu"
        self._choices = {
            layer: LayerChoice(policy, layer, each)
            for layer, each in ranks_of.items()
            if is_choosing and any(len(ranks) > 1 for ranks in each)
        }

    def with_layers(self, ranks_of: Mapping[int, Sequence[Sequence[int]]]) -> RowSplit:
        """As this one, but for these layers; the others' tables are shared."""
        split = RowSplit(ranks_of, self._num_ranks, self._device, self._policy)
        kept = {layer: choice for layer, choice in self._choices.items() if layer not in ranks_of}
        split._turns, split._choices = self._turns | split._turns, kept | split._choices
        return split

    def split(self, layer: int, rows: RoutedRows) -> list[RankRows]:
        """One entry for each rank, in their order. On a GPU it waits: how many rows there are
        decides how large tensors are.

        Worked example, 2 ranks, experts 0, 1 on the first and 2, 3 on the second, K = 2, ids
        [[0, 1], [1, 3], [2, 3]]: the first gets rows [0, 1] with [[0, 1], [1, -1]], the second
        rows [1, 2] with [[-1, 3], [2, 3]].
        """
        if self._num_ranks == 1:
            return [RankRows(None, rows.x_TD, rows.expert_ids_TK, rows.weights_TK)]
        rank_TK = self._ranks(layer, rows.expert_ids_TK)
        return [self._part(rows, rank_TK == rank) for rank in range(self._num_ranks)]

    def masked(self, layer: int, rows: RoutedRows) -> list[RankRows]:
        """As `split`, but every rank gets every row; nothing waits for the device."""
        if self._num_ranks == 1:
            return self.split(layer, rows)
        rank_TK = self._ranks(layer, rows.expert_ids_TK)
        return [
            RankRows(
                None,
                rows.x_TD,
                rows.expert_ids_TK.masked_fill(rank_TK != rank, -1),
                rows.weights_TK,
            )
            for rank in range(self._num_ranks)
        ]

    def _ranks(self, layer: int, expert_ids_TK: Tensor) -> Tensor:
        choice = self._choices.get(layer)
        if choice is None:
            return self._turns[layer].ranks(expert_ids_TK)
        return torch.from_numpy(choice.ranks(expert_ids_TK.numpy()))

    def _part(self, rows: RoutedRows, is_here_TK: Tensor) -> RankRows:
        rows_n = is_here_TK.any(dim=1).nonzero()[:, 0]
        ids_TK = rows.expert_ids_TK.masked_fill(~is_here_TK, -1)
        if len(rows_n) == len(ids_TK):
            return RankRows(None, rows.x_TD, ids_TK, rows.weights_TK)
        return RankRows(rows_n, rows.x_TD[rows_n], ids_TK[rows_n], rows.weights_TK[rows_n])


@dataclass(frozen=True, slots=True)
class _Turns:
    """A layer's ReplicaChoice as tensors."""

    ranks_EM: Tensor
    counts_E: Tensor
    first_E: Tensor

    @classmethod
    def of(cls, layer: int, ranks_of: Sequence[Sequence[int]], device: torch.device) -> _Turns:
        choice = ReplicaChoice.of(layer, ranks_of)
        arrays = (choice.ranks_EM, choice.counts_E, choice.first_E)
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))

    def ranks(self, expert_ids_TK: Tensor) -> Tensor:
        """The rank of each choice [T, K]."""
        if self.ranks_EM.shape[1] == 1:
            return self.ranks_EM[:, 0][expert_ids_TK]
        rows_T1 = torch.arange(len(expert_ids_TK), device=expert_ids_TK.device)[:, None]
        turns_TK = (rows_T1 + self.first_E[expert_ids_TK]) % self.counts_E[expert_ids_TK]
        return self.ranks_EM[expert_ids_TK, turns_TK]
