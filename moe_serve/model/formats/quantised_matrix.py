"""A weight matrix of few bits, and how it becomes one of floats.

    N rows (outputs), K columns (inputs), B bytes of a row, G groups of columns

    weight[n, k] = (value[n, k] - zero[n, group(k)]) * scale[n, group(k)]

Values and zeros are small whole numbers (or 8-bit floats, without zeros), so the only rounding is
that of the product: in float32 to the dtype that the reference multiplies in, then to the wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_serve.model.formats.byte_table import ByteTable

_InPlace = Callable[[Tensor, Tensor], Tensor]
_VALUES_AT_ONCE = 2**18  # a chunk of rows in float32 stays in the second-level cache


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedMatrix:
    """The parts of one matrix, as views of the checkpoint or small copies."""

    bytes_NB: Tensor  # uint8; the bytes behind column K are padding
    table: ByteTable
    num_columns: int
    scales_NG: Tensor  # N may be 1: the same for all rows
    zeros_NG: Tensor | None = None
    group_of_K: Tensor | None = None  # None: K / G neighbouring columns each
    # What the reference multiplies in, if that is narrower than float32.
    product_dtype: torch.dtype = torch.float32

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in `dtype`; a few rows at a time, so that only the result is large."""
        num_rows, num_columns = len(self.bytes_NB), self.num_columns
        scales_NG = self.scales_NG.float().expand(num_rows, -1)
        zeros_NG = None if self.zeros_NG is None else self.zeros_NG.float().expand(num_rows, -1)
        weight_NK = torch.empty(num_rows, num_columns, dtype=dtype)
        step = max(1, _VALUES_AT_ONCE // max(1, num_columns))
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            values_nK = self.table.decode(self.bytes_NB[rows])[:, :num_columns]
            if zeros_NG is not None:
                self._by_group(values_nK, zeros_NG[rows], torch.Tensor.sub_)
            self._by_group(values_nK, scales_NG[rows], torch.Tensor.mul_)
            weight_NK[rows] = values_nK.to(self.product_dtype)
        return weight_NK

    def _by_group(self, values_nK: Tensor, factors_nG: Tensor, change: _InPlace) -> None:
        """values[n, k] change= factors[n, group(k)]."""
        if self.group_of_K is not None:
            change(values_nK, factors_nG[:, self.group_of_K])
        else:
            change(values_nK.unflatten(1, (factors_nG.shape[1], -1)), factors_nG[:, :, None])
