"""Random matrices, and random additions of one bit per weight."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.interface.sign_matrix import SignMatrix, signs_of


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def signed(num_rows: int, width: int, seed: int, *, by_row: bool = False) -> SignMatrix:
    delta = 0.05 * random(num_rows, width, seed=seed)
    scales = delta.abs().mean(dim=1) if by_row else delta.abs().mean()[None]
    return SignMatrix(
        bits_NB=signs_of(delta),
        num_columns=width,
        scales_N=scales,
        bias_N=random(num_rows, seed=seed + 1) if by_row else None,
    )
