"""Names the adapters of rows in the frames that go to expert ranks (`experts/virtual_experts.py`).

T rows, R of them with one adapter, K choices, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from experts.expert_stage import RoutedRows
from moe_serve.model.stage.adapter_rows import ExpertRows


def with_virtual_ids(
    rows: RoutedRows, adapted: Sequence[ExpertRows], num_experts: int
) -> RoutedRows:
    """Returns rows in which the choices of adapters' own experts have virtual ids."""
    ids_TK = rows.expert_ids_TK
    own_AE = torch.stack([each.experts.is_own_E for each in adapted])
    numbers = [each.group.adapter.number for each in adapted]
    index_T = ids_TK.new_full((len(ids_TK),), -1)
    for index, each in enumerate(adapted):
        index_T = each.group.put(index_T, torch.full_like(each.group.select(index_T), index))
    is_own_TK = own_AE[index_T[:, None], ids_TK] & (index_T >= 0)[:, None]
    first_T = num_experts * torch.tensor(numbers, device=ids_TK.device)[index_T]
    return replace(rows, expert_ids_TK=torch.where(is_own_TK, ids_TK + first_T[:, None], ids_TK))


def adapter_numbers(ids_TK: Tensor, adapted: Sequence[ExpertRows]) -> Tensor:
    """Returns the number of each row's adapter [T, K] in place of its choices, for expert ranks
    that route; 0: the row has none."""
    numbers_TK = torch.zeros_like(ids_TK)
    for each in adapted:
        group = each.group
        number = torch.full_like(group.select(numbers_TK), group.adapter.number)
        numbers_TK = group.put(numbers_TK, number)
    return numbers_TK
