"""RMSNorm and rotary positions: fp32 inside, row-invariant.

T rows, H heads, D width of a row or a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.interface.attention_shape import RotaryTable


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) rounded to x's dtype, times weight. Over the last dimension."""
    normed = F.rms_norm(x_TD.float(), (x_TD.shape[-1],), eps=eps)
    return normed.to(x_TD.dtype) * weight_D


def rotary_table(angles_PD: Tensor) -> RotaryTable:
    """Angles [P, D / 2] of each position -> cos and sin [P, D] in fp32, halves repeated."""
    cos, sin = angles_PD.cos(), angles_PD.sin()
    return RotaryTable(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def rotate(x_THD: Tensor, cos_T1D: Tensor, signed_sin_T1D: Tensor) -> Tensor:
    """Rotary embedding of the 'halves' kind (Hugging Face's rotate_half), in fp32.

    `signed_sin` carries the minus of the first half, so that no negation runs per step.
    """
    half = x_THD.shape[-1] // 2
    swapped = torch.cat((x_THD[..., half:], x_THD[..., :half]), dim=-1)
    return x_THD * cos_T1D + swapped * signed_sin_T1D
