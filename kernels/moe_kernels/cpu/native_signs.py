"""Additions of one bit per weight in the native kernels, beside matrices that are held already.

N outputs, K inputs, B bytes of a row, E experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.cpu.cpu_library import Int, NativeLibrary, Pointer, address, num_panels
from moe_kernels.cpu.native_changes import ChangesStruct, LayerChangesStruct
from moe_kernels.interface.adapters import Rest, no_rest
from moe_kernels.interface.kernels import Linear
from moe_kernels.interface.sign_matrix import SignedExpert, SignMatrix

_PANEL, _WORD_BITS = 16, 32


class SignsStruct(ctypes.Structure):
    """`Signs` in cpu/source/low_bits/signs.h."""

    _fields_ = (
        ("bits", Pointer),
        ("scales", Pointer),
        ("bias", Pointer),
        *((name, Int) for name in ("has_column_scales", "num_outputs", "width")),
    )


class _SignedExpertStruct(ctypes.Structure):
    """`SignedExpert` in cpu/source/low_bits/signs.h."""

    _fields_ = tuple((name, SignsStruct) for name in ("gate", "up", "down"))


@dataclass(frozen=True, slots=True)
class PackedSigns:
    """Signs as the library reads them: the struct, and the tensors that it points to."""

    struct: SignsStruct
    bits: Tensor
    scales: Tensor
    bias: Tensor | None

    @property
    def pointer(self) -> int:
        return ctypes.addressof(self.struct)

    @property
    def nbytes(self) -> int:
        return (
            self.bits.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)
        )


def pack_signs(matrix: SignMatrix) -> PackedSigns:
    """Packs signs in panels of 16 outputs, and their scales by panel where the rows of each panel
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


def _words(bits_NB: NDArray[np.uint8], num_columns: int) -> NDArray[np.int32]:
    """[N, B] -> int32 [panels, words of 32 inputs, 16]: the first input is the lowest bit."""
    num_words = -(-num_columns // _WORD_BITS)
    panels = num_panels(len(bits_NB))
    padded = np.zeros((panels * _PANEL, num_words * _WORD_BITS // 8), dtype=np.uint8)
    padded[: len(bits_NB), : bits_NB.shape[1]] = bits_NB
    words = padded.view("<i4").reshape(panels, _PANEL, num_words)
    return np.ascontiguousarray(words.transpose(0, 2, 1))


class NativeSignedLinear:
    """Implements Linear: the result of another layer, and the addition."""

    __slots__ = ("_function", "_threads", "base", "signs")

    def __init__(self, native: NativeLibrary, base: Linear, added: SignMatrix) -> None:
        self.base, self.signs = base, pack_signs(added)
        self._function, self._threads = native.function("moe_add_signs"), native.threads

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        y_TN = self.base(x_TK) if residual_TN is None else self.base(x_TK, residual_TN)
        assert x_TK.stride(1) == 1 and y_TN.is_contiguous(), f"rows lie at {x_TK.stride()}"
        self._function(
            self.signs.pointer, x_TK.data_ptr(), x_TK.stride(0), y_TN.data_ptr(), len(x_TK),
            self._threads,
        )  # fmt: skip
        return y_TN


class NativeExpertSigns:
    """The additions to a layer's experts, packed once."""

    def __init__(
        self, added: Mapping[int, SignedExpert], is_changed_E: Tensor, rest: Rest = no_rest
    ) -> None:
        self._is_changed_E = is_changed_E.to(torch.uint8).contiguous()
        self._array = (_SignedExpertStruct * len(is_changed_E))()
        self._packed: list[list[PackedSigns]] = []
        for expert, each in added.items():
            self._packed.append(self._put(expert, each))
            rest()
        self.num_bytes = sum(each.nbytes for signs in self._packed for each in signs)
        self._struct = ChangesStruct(
            is_changed=self._is_changed_E.data_ptr(), signs=ctypes.addressof(self._array)
        )
        self.pointer = ctypes.addressof(self._struct)
        self._alone = LayerChangesStruct(experts=self.pointer)
        self.layer_pointer = ctypes.addressof(self._alone)

    def _put(self, expert: int, added: SignedExpert) -> list[PackedSigns]:
        parts = {"gate": added.gate, "up": added.up, "down": added.down}
        packed = {name: pack_signs(each) for name, each in parts.items() if each is not None}
        for name, each in packed.items():
            setattr(self._array[expert], name, each.struct)
        return list(packed.values())
