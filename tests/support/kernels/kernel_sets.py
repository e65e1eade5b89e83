"""The kernel sets that run on this machine, and expert ids as a router chooses them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_kernels.interface.kernels import Kernels
from moe_kernels.kernel_choice import KernelsName, choose_kernels, native_refusal

_REFUSAL = native_refusal(torch.device("cpu"), torch.float32)
KERNEL_SETS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(_REFUSAL is not None, reason=str(_REFUSAL))),
]


def make_kernels(name: KernelsName, dtype: torch.dtype) -> Kernels:
    return choose_kernels(torch.device("cpu"), dtype, name)


ROUTINGS = ("any", "one", "few", "elsewhere")


def ids_of(num_rows: int, top_k: int, num_experts: int, routing: str) -> Tensor:
    """Returns [T, K] int64, ascending in each row.

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
