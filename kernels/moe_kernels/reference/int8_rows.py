"""The definition of products with quantised rows: every set of kernels has these very bits.

A row is cut into groups of 32 values. With m a group's largest magnitude, its scale is m / 127 and
its whole numbers are x (127 / m), rounded to nearest even. The sum over a group of a row's and a
matrix's whole numbers is exact, so no order of summing can show. The groups add up in one chain,

    c = c + sum * (weight scale * row scale),   in ascending order,

and each of these operations is rounded to float32 by itself. Twice the values of E2M1 are whole.

T rows, N outputs, K inputs, G groups of 32 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.interface.quantised_matrix import ROW_GROUP, QuantisedMatrix

_MOST = 127.0
_LEAST_MAGNITUDE = 2.0**-100  # groups below it count as zeros


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Rows as whole numbers, held as floats, [G, T, 32], and their scales [T, G]."""

    values_GT: Tensor
    scales_TG: Tensor


def quantised_rows(x_TK: Tensor) -> Int8Rows:
    """A group with a NaN or an infinity has the scale NaN."""
    x_TG = x_TK.float().unflatten(1, (-1, ROW_GROUP))
    most_TG = x_TG.abs().amax(dim=2)
    is_usable_TG = most_TG.isfinite() & (most_TG >= _LEAST_MAGNITUDE)
    whole_TG = torch.full_like(most_TG, _MOST)  # torch divides by a number in another way
    factors_TG = whole_TG / most_TG.where(is_usable_TG, 1.0)
    values_TG = torch.round(x_TG * factors_TG[:, :, None])
    values_TG = values_TG.where(is_usable_TG[:, :, None], 0.0)
    scales_TG = (most_TG / whole_TG).where(is_usable_TG, 0.0)
    scales_TG = scales_TG.where(most_TG.isfinite(), torch.nan)
    return Int8Rows(values_TG.transpose(0, 1), scales_TG)


class Int8Matrix:
    """A matrix as whole numbers less their zeros, held as floats, and its scales [N, G]."""

    def __init__(self, matrix: QuantisedMatrix) -> None:
        num_rows, width = matrix.shape
        form = matrix.form
        assert form.can_quantise_rows and width % ROW_GROUP == 0, f"{form.name} of {width} inputs"
        values_NK = matrix.table.decode(matrix.bytes_NB)[:, :width]
        group = form.group or width
        group_of_G = torch.arange(0, width, ROW_GROUP) // group
        if matrix.zeros_NG is not None:
            zeros_NG = matrix.zeros_NG.float().expand(num_rows, -1)[:, group_of_G]
            values_NK = values_NK - zeros_NG.repeat_interleave(ROW_GROUP, dim=1)
        scales_NG = matrix.float_scales().expand(num_rows, -1)[:, group_of_G]
        if form.values == "e2m1":
            values_NK, scales_NG = values_NK * 2.0, scales_NG * 0.5
        self.scales_NG = scales_NG
        self.values_GN = values_NK.unflatten(1, (-1, ROW_GROUP)).transpose(0, 1)


def int8_product(rows: Int8Rows, matrix: Int8Matrix) -> Tensor:
    """[T, N] in float32. A group's sum stays below 2^24, where float32 has every whole number."""
    sums_GTN = torch.bmm(rows.values_GT, matrix.values_GN.transpose(1, 2))
    total_TN = torch.zeros_like(sums_GTN[0])
    for group, sums_TN in enumerate(sums_GTN):
        scales_TN = matrix.scales_NG[None, :, group] * rows.scales_TG[:, None, group]
        total_TN = total_TN + sums_TN * scales_TN
    return total_TN
