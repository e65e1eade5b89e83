"""Random quantised matrices of every form that checkpoints have.

N outputs, K inputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_kernels.interface.quantised_matrix import (
    E2M1,
    E4M3,
    INT8,
    OFFSET4,
    OFFSET8,
    UINT4,
    UINT8,
    ByteTable,
    MatrixForm,
    QuantisedMatrix,
    ScaleFormat,
    ValueFormat,
)

_VALUES: dict[ByteTable, ValueFormat] = {
    UINT4: "int4",
    OFFSET4: "int4",
    UINT8: "int8",
    OFFSET8: "int8",
    INT8: "int8",
    E4M3: "e4m3",
    E2M1: "e2m1",
}
_SCALES: dict[torch.dtype, ScaleFormat] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.uint8: "e8m0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A form of matrix. `name` is for messages; the other fields are those of MatrixForm."""

    name: str
    table: ByteTable
    group: int = 0
    block_rows: int = 1
    has_zeros: bool = False
    is_shuffled: bool = False
    scale_dtype: torch.dtype = torch.float32

    @property
    def form(self) -> MatrixForm:
        return MatrixForm(
            values=_VALUES[self.table],
            scales=_SCALES[self.scale_dtype],
            group=self.group,
            block_rows=self.block_rows,
            has_zeros=self.has_zeros,
            is_shuffled=self.is_shuffled,
        )

    def matrix(self, num_rows: int, num_columns: int, seed: int = 0) -> QuantisedMatrix:
        """Returns weights of about 1 / sqrt(K)."""
        generator = torch.Generator().manual_seed(seed)
        num_bytes = -(-num_columns // self.table.num_values)
        shape = (num_rows, num_bytes)
        bytes_NB = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        if self.table is E4M3:  # no NaN, and none of the large
            bytes_NB &= 0xBF
        num_groups = -(-num_columns // self.group) if self.group else 1
        scales_NG = self._scales(num_rows, num_groups, num_columns, generator)
        zeros_NG = None
        if self.has_zeros:
            bits = 4 if self.form.values == "int4" else 8
            zeros_NG = torch.randint(2**bits, scales_NG.shape, generator=generator)
            zeros_NG = (zeros_NG - self.table.offset).to(torch.int16)
        group_of_K = None
        if self.is_shuffled:
            order_K = torch.randperm(num_columns, generator=generator)
            group_of_K = order_K // self.group
        return QuantisedMatrix(
            form=self.form,
            table=self.table,
            bytes_NB=bytes_NB,
            num_columns=num_columns,
            scales_NG=scales_NG,
            zeros_NG=zeros_NG,
            group_of_K=group_of_K,
        )

    def _scales(
        self, num_rows: int, num_groups: int, num_columns: int, generator: torch.Generator
    ) -> Tensor:
        """Returns [N, G], or [1, G] if all rows share one."""
        num_blocks = -(-num_rows // self.block_rows) if self.block_rows else 1
        if self.table is E2M1:
            shape = (num_blocks, num_groups)
            return torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        largest = {"int4": 8.0, "int8": 128.0, "e4m3": 2.0, "e2m1": 6.0}[self.form.values]
        scales = torch.rand(num_blocks, num_groups, generator=generator) + 0.5
        scales = (scales / largest * num_columns**-0.5).to(self.scale_dtype)
        if self.block_rows > 1:
            scales = scales.repeat_interleave(self.block_rows, dim=0)[:num_rows]
        return scales


def rounded_once(matrix: QuantisedMatrix, dtype: torch.dtype) -> QuantisedMatrix:
    """Returns a matrix whose product is rounded once, to `dtype`."""
    return replace(matrix, product_dtype=dtype)


_BF16, _FP16 = torch.bfloat16, torch.float16
KINDS = (
    Kind(name="fp8 blocks", table=E4M3, group=128, block_rows=128),
    Kind(name="fp8 wide blocks", table=E4M3, group=256, block_rows=128, scale_dtype=_BF16),
    Kind(name="fp8 rows", table=E4M3, scale_dtype=_BF16),
    Kind(name="fp8 matrix", table=E4M3, block_rows=0),
    Kind(name="mxfp4", table=E2M1, group=32, scale_dtype=torch.uint8),
    Kind(name="int4 rows", table=OFFSET4, scale_dtype=_BF16),
    Kind(name="int4 matrix", table=OFFSET4, block_rows=0),
    Kind(name="int4 groups of 32", table=OFFSET4, group=32, scale_dtype=_BF16),
    Kind(name="int4 groups of 96", table=OFFSET4, group=96),
    Kind(name="int4 groups of 256", table=OFFSET4, group=256),
    Kind(name="int4 with zeros", table=OFFSET4, group=32, has_zeros=True, scale_dtype=_BF16),
    Kind(name="awq", table=UINT4, group=64, has_zeros=True, scale_dtype=_FP16),
    Kind(name="gptq rows", table=UINT4, has_zeros=True, scale_dtype=_FP16),
    Kind(name="int8 rows", table=INT8),
    Kind(name="int8 rows, packed", table=OFFSET8, scale_dtype=_BF16),
    Kind(name="int8 groups", table=INT8, group=64, scale_dtype=_BF16),
    Kind(name="int8 rows with zeros", table=INT8, has_zeros=True),
    Kind(name="gptq int8", table=UINT8, group=128, has_zeros=True, scale_dtype=_FP16),
)
