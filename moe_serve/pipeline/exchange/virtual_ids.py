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
    ids_TK = rows.expert_ids_TK.clone()
    for each in adapted:
        ids_RK = each.group.select(ids_TK)
        first = each.group.adapter.number * num_experts
        own_RK = torch.where(each.experts.is_own_E[ids_RK], ids_RK + first, ids_RK)
        ids_TK = each.group.put(ids_TK, own_RK)
    return replace(rows, expert_ids_TK=ids_TK)


def adapter_numbers(ids_TK: Tensor, adapted: Sequence[ExpertRows]) -> Tensor:
    """Returns the number of each row's adapter [T, K] in place of its choices, for expert ranks
    that route; 0: the row has none."""
    numbers_TK = torch.zeros_like(ids_TK)
    for each in adapted:
        group = each.group
        number = torch.full_like(group.select(numbers_TK), group.adapter.number)
        numbers_TK = group.put(numbers_TK, number)
    return numbers_TK
