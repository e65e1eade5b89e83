"""Splits rows among expert ranks.

A row goes to a rank at most once, however many of its choices are there.

`is_broadcast_worth` decides whether the attention side or the expert side chooses experts.

T rows, K choices, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experts.expert_stage import RoutedRows
from experts.placement.replicas.replica_choice import LayerChoice, ReplicaChoice, ReplicaPolicy
from moe_kernels.interface.rank_kernels import CopyTable


@dataclass(frozen=True, slots=True)
class RankRows:
    """The part of a micro-batch that one expert rank gets.

    `rows_n` is None when it gets all rows, in order.
    """

    rows_n: Tensor | None  # int64 [n], ascending
    x_nD: Tensor
    expert_ids_nK: Tensor  # -1: a choice that another rank serves
    weights_nK: Tensor


class RowSplit:
    """Knows which ranks hold each layer's experts, and which copy of an expert serves a row.

    The replica policy runs on the host. On other devices copies take turns, whatever the policy.
    """

    def __init__(
        self,
        ranks_of: Mapping[int, Sequence[Sequence[int]]],
        num_ranks: int,
        device: torch.device | None = None,
        policy: ReplicaPolicy = "round-robin",
        *,
        has_adapters: bool = False,
    ) -> None:
        """`ranks_of[layer][expert]`: the ranks, numbered 0 .. num_ranks - 1, that hold the expert.

        `device`: where the ids are; None means the CPU. `has_adapters`: ids may be virtual, and
        an adapter's expert is where the base model's is.
        """
        self._num_ranks, self._policy, self._has_adapters = num_ranks, policy, has_adapters
        self._device = device = device or torch.device("cpu")
        self._turns = {layer: _Turns.of(layer, each, device) for layer, each in ranks_of.items()}
        is_choosing = policy != "round-robin" and device.type == "cpu"
        self._choices = {
            layer: LayerChoice(policy, layer, each)
            for layer, each in ranks_of.items()
            if is_choosing and any(len(ranks) > 1 for ranks in each)
        }

    def with_layers(self, ranks_of: Mapping[int, Sequence[Sequence[int]]]) -> RowSplit:
        """Returns a split with new tables for these layers; the other tables are shared."""
        split = RowSplit(
            ranks_of,
            self._num_ranks,
            self._device,
            self._policy,
            has_adapters=self._has_adapters,
        )
        kept = {layer: choice for layer, choice in self._choices.items() if layer not in ranks_of}
        split._turns, split._choices = self._turns | split._turns, kept | split._choices
        return split

    def copies(self, layer: int) -> CopyTable | None:
        """Returns the ranks of a layer's experts as a table; None if a policy chooses copies."""
        return None if layer in self._choices else self._turns[layer].copies

    def split(self, layer: int, rows: RoutedRows) -> list[RankRows]:
        """Returns one entry for each rank, in rank order.

        On a GPU it waits, because the number of rows determines tensor sizes.

        Worked example, 2 ranks, experts 0, 1 on the first and 2, 3 on the second, K = 2:

            ids [[0, 1], [1, 3], [2, 3]]
            first rank: rows [0, 1] with [[0, 1], [1, -1]]
            second rank: rows [1, 2] with [[-1, 3], [2, 3]]
        """
        if self._num_ranks == 1:
            return [RankRows(None, rows.x_TD, rows.expert_ids_TK, rows.weights_TK)]
        rank_TK = self._ranks(layer, rows.expert_ids_TK)
        part = _part_on_host if self._device.type == "cpu" else _part
        return [part(rows, rank_TK == rank) for rank in range(self._num_ranks)]

    def masked(self, layer: int, rows: RoutedRows) -> list[RankRows]:
        """Splits as `split` does, but gives every rank every row; it never waits for the device."""
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
        if self._has_adapters:
            expert_ids_TK = expert_ids_TK % len(self._turns[layer].copies.counts_E)
        choice = self._choices.get(layer)
        if choice is None:
            return self._turns[layer].ranks(expert_ids_TK)
        return torch.from_numpy(choice.ranks(expert_ids_TK.numpy()))


def _part(rows: RoutedRows, is_here_TK: Tensor) -> RankRows:
    rows_n = is_here_TK.any(dim=1).nonzero()[:, 0]
    ids_TK = rows.expert_ids_TK.masked_fill(~is_here_TK, -1)
    if len(rows_n) == len(ids_TK):
        return RankRows(None, rows.x_TD, ids_TK, rows.weights_TK)
    return RankRows(rows_n, rows.x_TD[rows_n], ids_TK[rows_n], rows.weights_TK[rows_n])


def _part_on_host(rows: RoutedRows, is_here_TK: Tensor) -> RankRows:
    """Does the same as `_part` with numpy, whose calls on few rows are faster than torch's."""
    is_here = is_here_TK.numpy()
    ids_TK = np.where(is_here, rows.expert_ids_TK.numpy(), -1)
    rows_n = is_here.any(axis=1).nonzero()[0]
    if len(rows_n) == len(ids_TK):
        return RankRows(None, rows.x_TD, torch.from_numpy(ids_TK), rows.weights_TK)
    index_n = torch.from_numpy(rows_n)
    return RankRows(
        index_n,
        rows.x_TD.index_select(0, index_n),
        torch.from_numpy(ids_TK[rows_n]),
        rows.weights_TK.index_select(0, index_n),
    )


@dataclass(frozen=True, slots=True)
class _Turns:
    """A layer's ReplicaChoice as tensors."""

    copies: CopyTable

    @classmethod
    def of(cls, layer: int, ranks_of: Sequence[Sequence[int]], device: torch.device) -> _Turns:
        choice = ReplicaChoice.of(layer, ranks_of)
        arrays = (choice.ranks_EM, choice.counts_E, choice.first_E)
        return cls(CopyTable(*(torch.from_numpy(array).to(device) for array in arrays)))

    def ranks(self, expert_ids_TK: Tensor) -> Tensor:
        """Returns the rank of each choice [T, K]."""
        copies = self.copies
        if copies.ranks_EM.shape[1] == 1:
            return copies.ranks_EM[:, 0][expert_ids_TK]
        rows_T1 = torch.arange(len(expert_ids_TK), device=expert_ids_TK.device)[:, None]
        turns_TK = (rows_T1 + copies.first_E[expert_ids_TK]) % copies.counts_E[expert_ids_TK]
        return copies.ranks_EM[expert_ids_TK, turns_TK]


# broadcasting must move fewer bytes than this share: each expert rank then routes all rows
WORTH = 0.9


def routed_bytes(row_bytes: int, top_k: int, num_expert_ranks: int) -> float:
    """Returns the bytes sent for one row when the attention side chooses experts."""
    num_ranks = num_expert_ranks * (1.0 - (1.0 - 1.0 / num_expert_ranks) ** top_k)
    return num_ranks * (row_bytes + 8 * top_k)


def broadcast_bytes(row_bytes: int, num_expert_ranks: int) -> float:
    """Returns the bytes sent for one row when the expert side chooses experts."""
    return num_expert_ranks * (row_bytes + 4.0)


def is_broadcast_worth(row_bytes: int, top_k: int, num_expert_ranks: int) -> bool:
    """Returns whether `router: auto` lets the expert ranks choose, because that moves fewer bytes.

    With K choices, E expert ranks and rows of b bytes, a row that was routed first goes to every
    rank that holds one of its experts, on average E (1 - (1 - 1/E)^K) ranks if all are alike, with
    its choices (8 bytes each). A row that is routed by the expert ranks goes to all E, without
    choices, and its sums come back with its number (4 bytes). The sums themselves are the same.

    Worked example, 2048 values in bf16, K = 8, E = 4: 3.6 ranks x 4160 bytes against 4 x 4100, no.
    256 values, E = 1: 576 bytes against 516, yes.
    """
    routed = routed_bytes(row_bytes, top_k, num_expert_ranks)
    return broadcast_bytes(row_bytes, num_expert_ranks) <= WORTH * routed
