"""The forms in which the native kernels hold matrices: floats, or few bits with scales.

`cpu/source/low_bits/form.h` describes the memory. N outputs, K inputs, G groups.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.cpu.cpu_library import Int, NativeLibrary, Pointer
from moe_kernels.interface.quantised_matrix import (
    ROW_GROUP,
    LowBitProducts,
    MatrixForm,
    PackedLayout,
    QuantisedMatrix,
    ScaleFormat,
    ValueFormat,
    Weight,
)

_FLOATS = 0
_VALUES: dict[ValueFormat, int] = {"int4": 1, "int8": 2, "e4m3": 3, "e2m1": 4}
_SCALES: dict[ScaleFormat, int] = {"float32": 0, "bfloat16": 1, "float16": 2, "e8m0": 3}
_SCALE_DTYPES: dict[ScaleFormat, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e8m0": torch.uint8,
}
_ROUNDINGS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_EIGHT = 8  # inputs that lie together
_SIGN_BIT = 0x80
_UNIT_BYTES = 4


class FormStruct(ctypes.Structure):
    """`Form` in cpu/source/low_bits/form.h."""

    _fields_ = tuple(
        (name, Int)
        for name in (
            "values", "group", "scales", "has_zeros", "zero", "rounding", "has_int8_rows",
        )
    )  # fmt: skip


class _StoredStruct(ctypes.Structure):
    """`Stored` in cpu/source/low_bits/pack.cpp."""

    _fields_ = (
        ("bytes", Pointer),
        *((name, Int) for name in ("row_step", "num_rows", "width")),
        ("scales", Pointer),
        *((name, Int) for name in ("scale_row_step", "scale_group_step")),
        ("zeros", Pointer),
        *((name, Int) for name in ("zero_row_step", "zero_group_step", "flipped")),
    )


def native_layout(form: MatrixForm, products: LowBitProducts) -> PackedLayout | str:
    """Returns the layout of matrices of this form, or the reason why they are not held in few
    bits."""
    if form.is_shuffled:
        return "their groups are shuffled (activation order)"
    if form.group % _EIGHT:
        return f"{form.name} are not a multiple of {_EIGHT}"
    if form.has_zeros and form.values not in ("int4", "int8"):
        return f"{form.name} are not supported by the native kernels"
    shared_bits = form.scale_bits + (8 if form.has_zeros else 0)
    bits = form.value_bits + (shared_bits / form.group if form.group else 0.0)
    name = f"{form.name} x int8" if products == "int8" and form.can_quantise_rows else form.name
    return PackedLayout(name, bits)


@dataclass(frozen=True, slots=True)
class NativeForm:
    """Packs matrices of one form and K, which may be floats."""

    native: NativeLibrary
    struct: FormStruct
    width: int
    form: MatrixForm | None = None

    @classmethod
    def of(cls, native: NativeLibrary, weight: Weight) -> NativeForm:
        """Returns the form of a matrix [N, K]."""
        width = weight.shape[1]
        if isinstance(weight, Tensor):
            return cls(native, FormStruct(values=_FLOATS), width)
        return cls(native, _form_struct(native, weight), width, weight.form)

    def num_units(self, panels: int) -> int:
        """Returns the 32-bit units of a packed matrix."""
        if self.form is None:
            return self.native.packed_size(panels, self.width)
        function = self.native.library.moe_low_bit_bytes
        num_bytes: int = function(ctypes.addressof(self.struct), self.width, panels)
        return num_bytes // _UNIT_BYTES

    def pack(
        self, weight: Weight, packed: Tensor, panels: int, first: int = 0, stride: int = 1
    ) -> None:
        """Puts a matrix into every `stride`-th panel from `first` on of a packed one of
        `panels`."""
        assert weight.shape[1] == self.width, f"{weight.shape[1]} inputs, not {self.width}"
        if isinstance(weight, Tensor):
            assert self.form is None, f"a matrix in floats among {self.form}"
            assert weight.dtype == self.native.dtype, f"{weight.dtype} for {self.native.dtype}"
            self.native.pack(weight, packed, panels, first, stride)
            return
        assert weight.form == self.form, f"a matrix {weight.form} among {self.form}"
        assert bytes(_form_struct(self.native, weight)) == bytes(self.struct), "other zeros"
        assert packed.is_contiguous() and packed.numel() == self.num_units(panels), (
            f"packed memory of {packed.numel()} units for {panels} panels of {self.width}"
        )
        stored, _kept = _stored(weight)
        self.native.library.moe_pack_low_bits(
            ctypes.addressof(self.struct), ctypes.addressof(stored), packed.data_ptr(), first,
            stride, panels,
        )  # fmt: skip


def _form_struct(native: NativeLibrary, matrix: QuantisedMatrix) -> FormStruct:
    form, width = matrix.form, matrix.num_columns
    is_int8 = native.low_bit_products == "int8" and form.can_quantise_rows
    return FormStruct(
        values=_VALUES[form.values],
        group=form.group or -(-width // _EIGHT) * _EIGHT,
        scales=_SCALES[form.scales],
        has_zeros=form.has_zeros,
        zero=matrix.table.offset,
        rounding=_ROUNDINGS[matrix.product_dtype],
        has_int8_rows=is_int8 and width % ROW_GROUP == 0,
    )


def _stored(matrix: QuantisedMatrix) -> tuple[_StoredStruct, tuple[Tensor, ...]]:
    """Returns the matrix as the library reads it, and the tensors that must live until it was
    read."""
    num_rows, width = matrix.shape
    bytes_NB = matrix.bytes_NB if matrix.bytes_NB.stride(1) == 1 else matrix.bytes_NB.contiguous()
    scales_NG = matrix.scales_NG.expand(num_rows, -1)
    wanted = _SCALE_DTYPES[matrix.form.scales]
    assert scales_NG.dtype == wanted, f"{scales_NG.dtype} scales, not {wanted}"
    stored = _StoredStruct(
        bytes=bytes_NB.data_ptr(),
        row_step=bytes_NB.stride(0),
        num_rows=num_rows,
        width=width,
        scales=scales_NG.data_ptr(),
        scale_row_step=scales_NG.stride(0),
        scale_group_step=scales_NG.stride(1),
        flipped=_SIGN_BIT if matrix.table.is_signed else 0,
    )
    if matrix.zeros_NG is None:
        return stored, (bytes_NB, scales_NG)
    codes_NG = (matrix.zeros_NG.to(torch.int16) + matrix.table.offset).to(torch.uint8)
    codes_NG = codes_NG.expand(num_rows, -1)
    stored.zeros = codes_NG.data_ptr()
    stored.zero_row_step, stored.zero_group_step = codes_NG.stride()
    return stored, (bytes_NB, scales_NG, codes_NG)
