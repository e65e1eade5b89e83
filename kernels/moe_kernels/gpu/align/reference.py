"""The alignment in plain torch, with host syncs: what the kernels must equal.

S slots (rows times choices), E experts, R rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The used tiles only: experts [tiles], slots [tiles, R] padded with S, counts [E]."""

    experts: Tensor
    slots: Tensor
    counts_E: Tensor


def aligned_tiles(expert_ids_TK: Tensor, num_experts: int, block_rows: int) -> Tiles:
    """Returns the slots by expert, ascending within one, padded with S to whole tiles."""
    ids_S = expert_ids_TK.reshape(-1)
    experts: list[int] = []
    slots: list[Tensor] = []
    counts = []
    for expert in range(num_experts):
        own = torch.nonzero(ids_S == expert).view(-1).int()
        num_tiles = -(-len(own) // block_rows)
        padding = own.new_full((num_tiles * block_rows - len(own),), len(ids_S))
        experts += [expert] * num_tiles
        slots.append(torch.cat((own, padding)).view(num_tiles, block_rows))
        counts.append(len(own))
    return Tiles(
        experts=torch.tensor(experts, dtype=torch.int32, device=ids_S.device),
        slots=torch.cat(slots),
        counts_E=torch.tensor(counts, dtype=torch.int32, device=ids_S.device),
    )
