"""What a router might choose, the odd cases too."""

from __future__ import annotations

import torch
from torch import Tensor

ROUTINGS = ("any", "one", "few", "elsewhere")


def ids_of(num_rows: int, top_k: int, num_experts: int, routing: str) -> Tensor:
    """[T, K] int64, ascending in a row.

    "one": all rows to the last experts; "few": most experts empty; "elsewhere": some choices are
    of experts that are not here.
    """
    generator = torch.Generator().manual_seed(num_rows * 31 + num_experts)
    if routing == "one":
        return torch.arange(num_experts - top_k, num_experts).repeat(num_rows, 1)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    if routing == "few":
        scores[:, top_k + 1 :] = 0.0
    ids = scores.topk(top_k, dim=1).indices.sort(dim=1).values
    if routing == "elsewhere":
        ids[::2, 0] = -1
        ids[1::3, -1] = num_experts + 5
    return ids
