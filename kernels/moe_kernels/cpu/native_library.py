"""The compiled library as the native kernels use it: functions of one dtype, memory, packing."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_PANEL = 16  # columns of a panel, see cpu/panels.h
_UNIT_BYTES = 4

Pointer, Int, Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def num_panels(num_columns: int) -> int:
    return -(-num_columns // _PANEL)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """`threads` is the number that every call may use."""

    library: ctypes.CDLL
    dtype: torch.dtype
    threads: int

    def function(self, name: str) -> ctypes._NamedFuncPointer:
        """The library's function for this dtype."""
        found: ctypes._NamedFuncPointer = getattr(self.library, f"{name}_{SUFFIXES[self.dtype]}")
        return found

    def packed_size(self, panels: int, width: int, dtype: torch.dtype | None = None) -> int:
        """32-bit units of a packed matrix."""
        per_unit = _UNIT_BYTES // (dtype or self.dtype).itemsize
        return panels * _PANEL * -(-width // per_unit)

    def empty_packed(self, *sizes: int) -> Tensor:
        """Fresh memory of 32-bit units, in huge pages where they are to be had."""
        tensor = torch.empty(sizes, dtype=torch.int32)
        self.library.moe_advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def pack(
        self, weight_NK: Tensor, packed: Tensor, panels: int, first: int = 0, stride: int = 1
    ) -> None:
        """Put a matrix (any strides: it may be a view of a mapped file) into every `stride`-th
        panel from `first` on of a packed matrix of `panels`."""
        name = f"moe_pack_{SUFFIXES[weight_NK.dtype]}"
        rows, width = weight_NK.shape
        assert packed.is_contiguous() and packed.numel() == self.packed_size(
            panels, width, weight_NK.dtype
        ), f"packed memory of {packed.numel()} units for {panels} panels of {width}"
        getattr(self.library, name)(
            weight_NK.data_ptr(), *weight_NK.stride(), rows, width,
            packed.data_ptr(), first, stride, panels,
        )  # fmt: skip
