"""Additions of one bit per weight in the native kernels, beside matrices that are held already.

N outputs, K inputs, B bytes of a row, D model width, F expert width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.cpu.cpu_library import Int, NativeLibrary, Pointer, address, num_panels
from moe_kernels.cpu.native_experts import ExpertTable
from moe_kernels.interface.kernels import ExpertBank, Linear
from moe_kernels.interface.sign_matrix import SignedExpert, SignMatrix

_PANEL, _GROUP = 16, 64


class SignsStruct(ctypes.Structure):
    """`Signs` in cpu/source/low_bits/signs.h."""

    _fields_ = (
        ("bits", Pointer),
        ("scales", Pointer),
        ("bias", Pointer),
        *((name, Int) for name in ("has_column_scales", "num_outputs", "width")),
    )


class _SignedExpertStruct(ctypes.Structure):
    """`SignedExpert` in cpu/source/experts.h."""

    _fields_ = (("gate_up", SignsStruct), ("down", SignsStruct))


@dataclass(frozen=True, slots=True)
class PackedSigns:
    """Signs as the library reads them: the struct, and the tensors that it points to."""

    struct: SignsStruct
    bits: Tensor
    scales: Tensor
    bias: Tensor | None


def pack_signs(matrix: SignMatrix) -> PackedSigns:
    """Packs signs in groups of 64 columns, and their scales by panel where the rows of each panel
    have one."""
    bits = torch.from_numpy(_words(matrix.bits_NB.numpy(), matrix.num_columns))
    padding = -matrix.num_rows % _PANEL
    by_panel = F.pad(matrix.every_scale(), (0, padding)).view(-1, _PANEL)
    if padding:
        by_panel[-1, -padding:] = by_panel[-1, 0]  # columns that are not stored
    is_shared = bool((by_panel == by_panel[:, :1]).all())
    scales = (by_panel[:, 0] if is_shared else by_panel.flatten()).contiguous().clone()
    bias = None if matrix.bias_N is None else matrix.bias_N.contiguous()
    struct = SignsStruct(
        bits.data_ptr(), scales.data_ptr(), address(bias), not is_shared, matrix.num_rows,
        matrix.num_columns,
    )  # fmt: skip
    return PackedSigns(struct, bits, scales, bias)


def _words(bits_NB: NDArray[np.uint8], num_columns: int) -> NDArray[np.int64]:
    """[N, B] -> int64 [groups of 64 outputs, K]: bit i is that of the group's output i."""
    bits_NK = np.unpackbits(bits_NB, axis=1, bitorder="little")[:, :num_columns]
    padded = np.pad(bits_NK, ((0, -len(bits_NK) % _GROUP), (0, 0)))
    by_group = padded.reshape(-1, _GROUP, num_columns).transpose(0, 2, 1)
    packed = np.packbits(np.ascontiguousarray(by_group), axis=2, bitorder="little")
    words: NDArray[np.int64] = packed.view(np.int64)[:, :, 0].copy()
    return words


class NativeSignedLinear:
    """Implements Linear: the result of another layer, and the addition."""

    __slots__ = ("_base", "_function", "_signs", "_threads")

    def __init__(self, native: NativeLibrary, base: Linear, added: SignMatrix) -> None:
        self._base, self._signs = base, pack_signs(added)
        self._function, self._threads = native.function("moe_add_signs"), native.threads

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        y_TN = self._base(x_TK)
        assert x_TK.stride(1) == 1 and y_TN.is_contiguous(), f"rows lie at {x_TK.stride()}"
        assert residual_TN is None or residual_TN.is_contiguous(), "the residual has gaps"
        out_TN = torch.empty_like(y_TN)
        self._function(
            ctypes.addressof(self._signs.struct), x_TK.data_ptr(), x_TK.stride(0), y_TN.data_ptr(),
            address(residual_TN), out_TN.data_ptr(), len(x_TK), self._threads,
        )  # fmt: skip
        return out_TN


class NativeSignedExperts(ExpertTable):
    """Implements ExpertBank: experts of other banks, whose memory they share, and additions."""

    def __init__(
        self, base: Sequence[ExpertBank | None], added: Sequence[SignedExpert | None]
    ) -> None:
        tables = [_table(bank) for bank in base if bank is not None]
        first = tables[0]
        super().__init__(first.panels, len(base), first.activation)
        self._signs: list[PackedSigns] = []  # what the structs point to
        self._array = (_SignedExpertStruct * len(base))()
        for expert, (bank, each) in enumerate(zip(base, added, strict=True)):
            if bank is not None and each is not None:
                self.put(expert, _table(bank).packed(expert))
                self._put_signs(expert, each)
        self.with_signs(ctypes.addressof(self._array))

    def _put_signs(self, expert: int, added: SignedExpert) -> None:
        entry, panels = self._array[expert], self.panels
        gate_up = _alternating(added.gate, added.up, panels.f, panels.d)
        for field, matrix in (("gate_up", gate_up), ("down", added.down)):
            if matrix is not None:
                packed = pack_signs(matrix)
                self._signs.append(packed)
                setattr(entry, field, packed.struct)


def _table(bank: ExpertBank) -> ExpertTable:
    assert isinstance(bank, ExpertTable), f"signs are added to native experts, not {type(bank)}"
    return bank


def _alternating(
    gate: SignMatrix | None, up: SignMatrix | None, num_rows: int, width: int
) -> SignMatrix | None:
    """Returns the rows of both in alternating panels, as those of the experts lie."""
    if gate is None and up is None:
        return None
    count = num_panels(num_rows) * _PANEL
    bits = torch.zeros(2, count, -(-width // 8), dtype=torch.uint8)
    scales, bias = torch.zeros(2, count), torch.zeros(2, count)
    for i, matrix in enumerate((gate, up)):
        if matrix is not None:
            bits[i, :num_rows] = matrix.bits_NB
            scales[i, :num_rows] = matrix.every_scale()
            scales[i, num_rows:] = scales[i, num_rows - 1]
            if matrix.bias_N is not None:
                bias[i, :num_rows] = matrix.bias_N
    has_bias = any(m is not None and m.bias_N is not None for m in (gate, up))
    bits, scales, bias = (
        each.unflatten(1, (-1, _PANEL)).transpose(0, 1).flatten(0, 2)
        for each in (bits, scales, bias)
    )
    return SignMatrix(
        bits_NB=bits, num_columns=width, scales_N=scales, bias_N=bias if has_bias else None
    )
