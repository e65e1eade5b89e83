"""A weight matrix of few bits: its form, the values of its bytes, and how it becomes a matrix of
floats.

    N rows (outputs), K columns (inputs), B bytes of a row, G groups of columns

    weight[n, k] = (value[n, k] - zero[n, group(k)]) * scale[n, group(k)]

A byte holds one value (int8, fp8) or two (int4, fp4: the low four bits come first). A `ByteTable`
has the 256 answers in float32, in which all of them are exact, so looking up loses nothing, and it
is several times faster than converting value by value. Values and zeros are small whole numbers (or
8-bit floats, without zeros), so the only rounding is that of the product: in float32 to the dtype
that the reference multiplies in, then to the wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# OCP Microscaling Formats (MX) v1.0, table 5: E2M1, a sign bit above these eight magnitudes.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN = 0x80


class ByteTable:
    """256 bytes -> their values.

    Whole numbers have codes from 0 up: a value is its code - `offset`. Two's complement becomes
    that by turning the sign bit over. Floats are their own codes, with `offset` 0.
    """

    def __init__(
        self, values_256v: npt.NDArray[np.float32], offset: int = 0, is_signed: bool = False
    ) -> None:
        self.num_values = values_256v.shape[1]
        self.offset, self.is_signed = offset, is_signed
        assert self.num_values in (1, 2), f"{self.num_values} values of a byte"
        # One or two floats are one item, so that a look-up copies them together.
        item = np.dtype(np.float32 if self.num_values == 1 else np.complex64)
        self._items = np.ascontiguousarray(values_256v).view(item).reshape(256)

    def decode(self, bytes_NB: Tensor) -> Tensor:
        """[N, B] uint8 -> [N, B * values of a byte] float32, in memory of its own."""
        if bytes_NB.device.type == "cpu":
            return torch.from_numpy(self._items.take(bytes_NB.numpy()).view(np.float32))
        values = torch.from_numpy(self._items.view(np.float32)).view(256, self.num_values)
        return values.to(bytes_NB.device)[bytes_NB.long()].flatten(1)

    def codes(self, bytes_NB: Tensor) -> Tensor:
        """[N, B] uint8 -> [N, B * values of a byte] uint8."""
        if self.num_values == 2:
            return torch.stack((bytes_NB & 15, bytes_NB >> 4), dim=-1).flatten(1)
        return bytes_NB ^ _SIGN if self.is_signed else bytes_NB


def transposed_bytes(words_KN: Tensor) -> Tensor:
    """[K, N] words packed along K -> [N, bytes of K] uint8, the lowest bits of a word first."""
    words_NK = words_KN.t().clone(memory_format=torch.contiguous_format)
    return words_NK.view(torch.uint8)


def _halves(values_16: npt.NDArray[np.float32], offset: int = 0) -> ByteTable:
    """Returns two values in a byte: its low four bits, then its high ones."""
    byte = np.arange(256)
    return ByteTable(np.stack([values_16[byte & 15], values_16[byte >> 4]], axis=1), offset)


def _bytes_as(dtype: torch.dtype) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = (
        torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    )
    return values[:, None]


UINT4 = _halves(np.arange(16, dtype=np.float32))
UINT8 = ByteTable(_bytes_as(torch.uint8))
# Signed values stored with an offset of half their range: 0 stands for -8 or -128.
OFFSET4 = _halves(np.arange(-8, 8, dtype=np.float32), 8)
OFFSET8 = ByteTable(_bytes_as(torch.uint8) - 128, 128)
INT8 = ByteTable(_bytes_as(torch.int8), 128, is_signed=True)
E4M3 = ByteTable(_bytes_as(torch.float8_e4m3fn))
E2M1 = _halves(np.array([s * m for s in (1, -1) for m in _E2M1_MAGNITUDES], dtype=np.float32))
# The same, table 7: a scale that is an exponent alone, 2 to the (byte - 127); 255 is NaN.
E8M0 = ByteTable(
    np.array([2.0 ** (b - 127) for b in range(255)] + [np.nan], dtype=np.float32)[:, None]
)


# How rows are multiplied with matrices in few bits: exact products have the bits of the dequantised
# matrix; for int8 the rows are quantised too (moe_kernels/reference/int8_rows.py).
LowBitProducts = Literal["exact", "int8"]
ROW_GROUP = 32  # values of a row that share a scale, where rows are quantised
# int4 and int8 are whole numbers, e4m3 floats of 8 bits, e2m1 floats of 4 bits.
ValueFormat = Literal["int4", "int8", "e4m3", "e2m1"]
# e8m0 is an exponent alone.
ScaleFormat = Literal["float32", "float16", "bfloat16", "e8m0"]

_BITS: dict[ValueFormat, int] = {"int4": 4, "int8": 8, "e4m3": 8, "e2m1": 4}
_SCALE_BITS: dict[ScaleFormat, int] = {"float32": 32, "float16": 16, "bfloat16": 16, "e8m0": 8}
_ZERO_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixForm:
    """A matrix of N outputs and K inputs as it is stored.

    `group`: neighbouring inputs that share a scale, the last ones may be fewer; 0: all do.
    `block_rows`: neighbouring outputs that share their scales; 1: none do, 0: all do.
    `is_shuffled`: a group's inputs are not neighbours (activation order). `is_transposed`: the
    checkpoint's tensor of this name is [K, N].
    """

    values: ValueFormat
    scales: ScaleFormat
    group: int = 0
    block_rows: int = 1
    has_zeros: bool = False
    is_shuffled: bool = False
    is_transposed: bool = False

    @property
    def name(self) -> str:
        """For messages: "int4 groups of 128 with zeros"."""
        sharing = "rows" if self.block_rows == 1 else "matrices"
        if self.group:
            sharing = f"groups of {self.group}"
            if self.block_rows > 1:
                sharing = f"blocks of {self.block_rows}x{self.group}"
        zeros = " with zeros" if self.has_zeros else ""
        return f"{self.values} {sharing}{zeros}"

    def transposed(self) -> MatrixForm | None:
        """Returns the form of the transposed matrix; None if transposing would need repacking.

        Blocks are turned over too, and rows with a scale each would be columns with one.
        """
        is_row_scaled = self.block_rows == 1
        if self.value_bits != 8 or self.has_zeros or self.is_shuffled or is_row_scaled:
            return None
        return replace(
            self,
            group=self.block_rows,
            block_rows=self.group,
            is_transposed=not self.is_transposed,
        )

    @property
    def value_bits(self) -> int:
        return _BITS[self.values]

    @property
    def scale_bits(self) -> int:
        return _SCALE_BITS[self.scales]

    @property
    def can_quantise_rows(self) -> bool:
        """True if rows may be quantised for such matrices, where ROW_GROUP divides K."""
        return self.values != "e4m3" and self.group % ROW_GROUP == 0 and not self.is_shuffled

    @property
    def bits(self) -> float:
        """Bits of a weight, with its share of a scale and of a zero of eight bits."""
        if not self.group or not self.block_rows:
            return float(self.value_bits)
        shared_bits = self.scale_bits + (_ZERO_BITS if self.has_zeros else 0)
        return self.value_bits + shared_bits / (self.group * self.block_rows)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A set's storage for matrices of a form: its name, and the bits of a weight."""

    name: str
    bits: float


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

    def __len__(self) -> int:
        return len(self.bytes_NB)

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
        """Returns the scales in float32."""
        if self.scales_NG.dtype == torch.uint8:
            return E8M0.decode(self.scales_NG)
        return self.scales_NG.float()

    def rows(self, wanted: slice | Tensor) -> QuantisedMatrix:
        """Some of the rows: views of a slice's. Where rows share scales, whole blocks of them."""
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
        """Returns the same with other tensors."""
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


def selected_rows(weight: Weight, wanted: slice | Tensor) -> Weight:
    """Some of the rows of a matrix, or all in another order."""
    return weight[wanted] if isinstance(weight, Tensor) else weight.rows(wanted)


def joined_rows(parts: Sequence[Weight]) -> Weight:
    """Returns the rows of all parts, one after the other: all tensors, or quantised matrices of one
    form."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([only_floats(part) for part in parts])
    matrices = [part for part in parts if isinstance(part, QuantisedMatrix)]
    assert len(matrices) == len(parts) and len({m.form for m in matrices}) == 1, "several forms"
    zeros = [m.zeros_NG.expand(len(m), -1) for m in matrices if m.zeros_NG is not None]
    return replace(
        first,
        bytes_NB=torch.cat([m.bytes_NB for m in matrices]),
        scales_NG=torch.cat([m.scales_NG.expand(len(m), -1) for m in matrices]),
        zeros_NG=torch.cat(zeros) if zeros else None,
    )


def as_floats(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Returns a quantised matrix in `dtype`, a tensor as it is."""
    return weight if isinstance(weight, Tensor) else weight.dequantised(dtype)


def only_floats(weight: Weight) -> Tensor:
    """Refuses packed matrices, for kernel sets that only hold floats (their `packed_layout` says
    so).
    """
    assert isinstance(weight, Tensor), "this set of kernels was given a packed matrix"
    return weight
