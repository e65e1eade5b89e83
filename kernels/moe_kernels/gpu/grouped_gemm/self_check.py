"""Checks once, at load, that this chip gives a row the same bits in tiles of all sizes."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_kernels.gpu.grouped_gemm.api import Chip, grouped_experts
from moe_kernels.gpu.grouped_gemm.experts import GroupedExperts
from moe_kernels.gpu.grouped_gemm.heuristics import BLOCK_MS

_ROWS, _TOP_K = 96, 2


def has_equal_tiles(experts: GroupedExperts, dtype: torch.dtype, chip: Chip) -> bool:
    """Run random rows through these experts in every tile size, and compare the results' bits.

    The kernels add in the same order in every size; the instructions a size compiles to might not
    round alike. Waits for the device, and compiles what serving compiles: not while a CUDA graph
    is captured. Experts of the same shapes, format and dtype need one answer.
    """
    device = experts.gate_up.values.device
    generator = torch.Generator(device=device).manual_seed(1)
    x_TD = torch.randn(_ROWS, experts.width, generator=generator, device=device).to(dtype)
    top_k = min(_TOP_K, experts.num_experts)
    # Few experts, so that tiles of all sizes get more rows than one.
    first = torch.arange(_ROWS, device=device) % max(1, min(experts.num_experts, 4) - top_k + 1)
    ids_TK = first[:, None] + torch.arange(top_k, device=device)
    weights_TK = torch.rand(_ROWS, top_k, generator=generator, device=device)
    chip = replace(chip, has_equal_tiles=True)
    results = [
        grouped_experts(x_TD, ids_TK, weights_TK, experts, chip, block_m) for block_m in BLOCK_MS
    ]
    # The direct path: each row alone, where a slot is a tile.
    alone = grouped_experts(
        x_TD[:1], ids_TK[:1].contiguous(), weights_TK[:1], experts, chip, BLOCK_MS[0]
    )
    is_equal = all(torch.equal(result, results[0]) for result in results[1:])
    return is_equal and torch.equal(alone[0], results[0][0])
