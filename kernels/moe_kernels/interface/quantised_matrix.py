"""A weight matrix of few bits, and how it becomes one of floats.

    N rows (outputs), K columns (inputs), B bytes of a row, G groups of columns

    weight[n, k] = (value[n, k] - zero[n, group(k)]) * scale[n, group(k)]

Values and zeros are small whole numbers (or 8-bit floats, without zeros), so the only rounding is
that of the product: in float32 to the dtype that the reference multiplies in, then to the wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_kernels.interface.byte_table import E8M0, ByteTable
from moe_kernels.interface.matrix_form import MatrixForm

_InPlace = Callable[[Tensor, Tensor], Tensor]
_VALUES_AT_ONCE = 2**18  # a chunk of rows in float32 stays in the second-level cache


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedMatrix:
    """The parts of one matrix: views of a checkpoint or small copies, or tensors of one's own."""

    form: MatrixForm
    table: ByteTable
    bytes_NB: Tensor  # uint8; the bytes behind column K are padding
    num_columns: int
    scales_NG: Tensor  # floats, or uint8 that E8M0 decodes; N may be 1: the same for all rows
    zeros_NG: Tensor | None = None  # such values as those of the table
    group_of_K: Tensor | None = None  # where the form is shuffled
    # The dtype that the reference multiplies in, if narrower than float32.
    product_dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.bytes_NB), self.num_columns))

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, as `Tensor.nbytes`."""
        parts = (self.bytes_NB, self.scales_NG, self.zeros_NG, self.group_of_K)
        return sum(0 if part is None else part.nbytes for part in parts)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in `dtype`; a few rows at a time, so that only the result is large."""
        num_rows, num_columns = self.shape
        scales_NG = self.float_scales().expand(num_rows, -1)
        zeros_NG = None if self.zeros_NG is None else self.zeros_NG.float().expand(num_rows, -1)
        weight_NK = torch.empty(self.shape, dtype=dtype, device=self.bytes_NB.device)
        step = max(1, _VALUES_AT_ONCE // max(1, num_columns))
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            values_nK = self.table.decode(self.bytes_NB[rows])[:, :num_columns]
            if zeros_NG is not None:
                self._by_group(values_nK, zeros_NG[rows], torch.Tensor.sub_)
            self._by_group(values_nK, scales_NG[rows], torch.Tensor.mul_)
            weight_NK[rows] = values_nK.to(self.product_dtype)
        return weight_NK

    def float_scales(self) -> Tensor:
        """The scales in float32."""
        if self.scales_NG.dtype == torch.uint8:
            return E8M0.decode(self.scales_NG)
        return self.scales_NG.float()

    def rows(self, wanted: slice) -> QuantisedMatrix:
        """Some of the rows: views. Where rows share scales, whole blocks of them."""
        return self._each(lambda part: part[wanted] if len(part) == len(self.bytes_NB) else part)

    def transposed(self) -> QuantisedMatrix:
        """[K, N], with bytes of its own; only where the form can be."""
        form = self.form.transposed()
        assert form is not None, f"{self.form.name} cannot be transposed"
        scales = self.scales_NG
        if self.form.group:
            scales = scales[:: self.form.block_rows].t()
            scales = scales.repeat_interleave(form.block_rows, dim=0)[: self.num_columns]
        return replace(
            self,
            form=form,
            bytes_NB=self.bytes_NB.t().contiguous(),
            num_columns=len(self.bytes_NB),
            scales_NG=scales,
        )

    def to(self, device: torch.device) -> QuantisedMatrix:
        return self._each(lambda part: part.to(device), of_groups=True)

    def clone(self) -> QuantisedMatrix:
        """In memory of its own."""
        return self._each(lambda part: part.clone(), of_groups=True)

    def _each(
        self, change: Callable[[Tensor], Tensor], *, of_groups: bool = False
    ) -> QuantisedMatrix:
        """The same with other tensors."""
        group_of_K = self.group_of_K
        return replace(
            self,
            bytes_NB=change(self.bytes_NB),
            scales_NG=change(self.scales_NG),
            zeros_NG=None if self.zeros_NG is None else change(self.zeros_NG),
            group_of_K=change(group_of_K) if of_groups and group_of_K is not None else group_of_K,
        )

    def _by_group(self, values_nK: Tensor, factors_nG: Tensor, change: _InPlace) -> None:
        """values[n, k] change= factors[n, group(k)]."""
        group_of_K, group = self.group_of_K, self.form.group
        if group_of_K is None and group and self.num_columns % group:
            group_of_K = torch.arange(self.num_columns, device=values_nK.device) // group
        if group_of_K is not None:
            change(values_nK, factors_nG[:, group_of_K])
        else:
            change(values_nK.unflatten(1, (factors_nG.shape[1], -1)), factors_nG[:, :, None])


Weight = Tensor | QuantisedMatrix


def as_floats(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A quantised matrix in `dtype`, a tensor as it is."""
    return weight if isinstance(weight, Tensor) else weight.dequantised(dtype)


def only_floats(weight: Weight) -> Tensor:
    """For sets that hold nothing else (their `packed_layout` says so)."""
    assert isinstance(weight, Tensor), "this set of kernels was given a packed matrix"
    return weight
