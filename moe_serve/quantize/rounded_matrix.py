"""A matrix rounded to whole numbers of few bits, and the tensors that compressed-tensors stores.

    N rows (outputs), K columns (inputs), G groups of columns

    weight[n, k] = value[n, k] * scale[n, group(k)],  -2^(bits - 1) <= value < 2^(bits - 1)

The stored words are those of `moe_serve.model.formats.compressed_tensors`, layout `pack-quantized`:
values are offset by half their range, and the first one is in the lowest bits of an int32.

MXFP4 (`moe_serve.model.formats.mxfp4`) fits the same record: twice an E2M1 value is a whole number,
and its scale is half the stored power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_serve.model.checkpoint.safetensors_writer import PlannedTensor

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Storage:
    """The bits of a value, and the neighbouring columns that share a scale; `group` 0: a whole
    row. `is_float`: E2M1 values whose scales are powers of two (MXFP4).
    """

    bits: int
    group: int
    is_float: bool = False

    @property
    def name(self) -> str:
        if self.is_float:
            return "mxfp4"
        return f"int{self.bits} " + (f"groups of {self.group}" if self.group else "rows")

    @property
    def most(self) -> int:
        """The largest value; the smallest is one further from 0."""
        return int(2 ** (self.bits - 1)) - 1

    def num_groups(self, num_columns: int) -> int:
        return num_columns // self.group if self.group else 1

    def planned(self, name: str, shape: Shape, dtype: torch.dtype) -> list[PlannedTensor]:
        """Returns the tensors that a matrix of this shape is stored as, with scales in `dtype`."""
        num_rows, num_columns = shape
        words = (num_rows, -(-num_columns * self.bits // 32))
        return [
            PlannedTensor(f"{name}_packed", torch.int32, words),
            PlannedTensor(f"{name}_scale", dtype, (num_rows, self.num_groups(num_columns))),
            PlannedTensor(f"{name}_shape", torch.int64, (2,)),
        ]


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """Values [N, K] in int8 and scales [N, G] in the dtype in which they are stored."""

    storage: Storage
    values_NK: Tensor
    scales_NG: Tensor

    @property
    def shape(self) -> Shape:
        return self.values_NK.shape[0], self.values_NK.shape[1]

    def floats(self, dtype: torch.dtype) -> Tensor:
        """Returns [N, K] as the loader reads it: the product is rounded to the scales' dtype."""
        num_groups = self.scales_NG.shape[1]
        values_NGc = self.values_NK.float().unflatten(1, (num_groups, -1))
        product = values_NGc * self.scales_NG.float()[:, :, None]
        weight_NK: Tensor = product.flatten(1).to(self.scales_NG.dtype).to(dtype)
        return weight_NK

    def rows(self, wanted: slice) -> RoundedMatrix:
        return RoundedMatrix(self.storage, self.values_NK[wanted], self.scales_NG[wanted])

    def stored(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yields the stored tensors by name."""
        yield f"{name}_packed", _words(self.values_NK, self.storage.bits)
        yield f"{name}_scale", self.scales_NG.contiguous()
        yield f"{name}_shape", torch.tensor(self.shape)


MXFP4 = Storage(bits=4, group=32, is_float=True)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # by code; the sign is the fourth bit
_EXPONENT_BIAS = 127


def mxfp4_parts(matrices: Sequence[RoundedMatrix]) -> tuple[Tensor, Tensor]:
    """Returns blocks [N, K / 32, 16] and scales [N, K / 32] in uint8, with the rows of the matrices
    in turn: row 0 of each, row 1 of each, and so on.
    """
    values_NK = torch.stack([each.values_NK for each in matrices], 1).flatten(0, 1)
    scales_NG = torch.stack([each.scales_NG for each in matrices], 1).flatten(0, 1)
    sizes_NK = values_NK.abs().int().contiguous()
    codes_NK = torch.bucketize(sizes_NK, torch.tensor(E2M1_DOUBLED).int())
    codes_NK = (codes_NK + 8 * (values_NK < 0)).to(torch.uint8)
    bytes_NB = codes_NK[:, ::2] | codes_NK[:, 1::2] << 4
    exponents_NG = scales_NG.log2().round().int() + 1 + _EXPONENT_BIAS
    return bytes_NB.unflatten(1, (-1, MXFP4.group // 2)), exponents_NG.to(torch.uint8)


def _words(values_NK: Tensor, bits: int) -> Tensor:
    """Packs int8 values -> [N, ceil(K * bits / 32)] int32."""
    bytes_NB = (values_NK + 2 ** (bits - 1)).to(torch.uint8)
    bytes_NB = F.pad(bytes_NB, (0, -bytes_NB.shape[1] % (32 // bits)))
    if bits == 4:
        bytes_NB = bytes_NB[:, ::2] | bytes_NB[:, 1::2] << 4
    return bytes_NB.contiguous().view(torch.int32)
