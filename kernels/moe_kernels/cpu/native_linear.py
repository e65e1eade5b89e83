"""Linear layers of the native kernels: weights packed once, at load.

T rows, N outputs, K inputs, H heads, D model width, E experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_kernels.cpu.cpu_library import Int, NativeLibrary, Pointer, address, num_panels
from moe_kernels.cpu.native_forms import FormStruct, NativeForm
from moe_kernels.interface.quantised_matrix import Weight


class _LinearStruct(ctypes.Structure):
    """`Linear` in cpu/linear.cpp."""

    _fields_ = (
        ("packed", Pointer),
        ("bias", Pointer),
        ("num_heads", Int),
        ("num_outputs", Int),
        ("width", Int),
        ("threads", Int),
        ("form", FormStruct),
    )


class _Packed:
    """Matrices [H, N, K] in the library's layout, and the struct that describes them. Matrices in
    few bits come alone."""

    __slots__ = ("_bias", "_memory", "_struct", "num_outputs", "pointer")

    def __init__(
        self, native: NativeLibrary, weights: Sequence[Weight], bias_N: Tensor | None
    ) -> None:
        first = weights[0]
        self.num_outputs, width = first.shape
        panels = num_panels(self.num_outputs)
        form = NativeForm.of(native, first)
        self._memory = native.empty_packed(len(weights), form.num_units(panels))
        for weight, memory in zip(weights, self._memory, strict=True):
            form.pack(weight, memory, panels)
        self._bias = None if bias_N is None else bias_N.float().contiguous()
        self._struct = _LinearStruct(
            self._memory.data_ptr(), address(self._bias), len(weights), self.num_outputs, width,
            native.threads, form.struct,
        )  # fmt: skip
        self.pointer = ctypes.addressof(self._struct)


class NativeLinear:
    """Implements Linear."""

    __slots__ = ("_function", "_packed")

    def __init__(self, native: NativeLibrary, weight_NK: Weight, bias_N: Tensor | None) -> None:
        self._function = native.function("moe_linear")
        self._packed = _Packed(native, [weight_NK], bias_N)

    @property
    def pointer(self) -> int:
        """Address of the struct that describes it, for kernels that call this one."""
        return self._packed.pointer

    @property
    def num_outputs(self) -> int:
        return self._packed.num_outputs

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        num_rows, row_step = x_TK.shape[0], x_TK.stride(0)
        assert x_TK.stride(1) == 1, f"rows of the input must be contiguous, not {x_TK.stride()}"
        out_TN = x_TK.new_empty(num_rows, self._packed.num_outputs)
        residual = None if residual_TN is None else residual_TN.data_ptr()
        self._function(
            self._packed.pointer, x_TK.data_ptr(), row_step, residual, out_TN.data_ptr(), num_rows
        )
        return out_TN


class NativeHeadLinear:
    """Implements HeadLinear."""

    __slots__ = ("_function", "_packed")

    def __init__(self, native: NativeLibrary, weight_HNK: Tensor) -> None:
        self._function = native.function("moe_head_linear")
        self._packed = _Packed(native, list(weight_HNK), None)

    @property
    def pointer(self) -> int:
        """Address of the struct that describes it, for kernels that call this one."""
        return self._packed.pointer

    def __call__(self, x_THK: Tensor) -> Tensor:
        num_rows, num_heads, _ = x_THK.shape
        row_step, head_step, value_step = x_THK.stride()
        assert value_step == 1, f"heads of the input must be contiguous, not {x_THK.stride()}"
        out_THN = x_THK.new_empty(num_rows, num_heads, self._packed.num_outputs)
        self._function(
            self._packed.pointer, x_THK.data_ptr(), row_step, head_step, out_THN.data_ptr(),
            num_rows,
        )  # fmt: skip
        return out_THN


class NativeRouterLinear:
    """Implements RouterLinear: the weights in fp32, the rows widened as they are read."""

    __slots__ = ("_function", "_packed")

    def __init__(self, native: NativeLibrary, weight_ED: Tensor, bias_E: Tensor | None) -> None:
        self._function = native.function("moe_router_linear")
        in_fp32 = replace(native, dtype=torch.float32)
        self._packed = _Packed(in_fp32, [weight_ED.float()], bias_E)

    @property
    def pointer(self) -> int:
        """Address of the struct that describes it, for kernels that call this one."""
        return self._packed.pointer

    def __call__(self, x_TD: Tensor) -> Tensor:
        num_rows, row_step = x_TD.shape[0], x_TD.stride(0)
        assert x_TD.stride(1) == 1, f"rows of the input must be contiguous, not {x_TD.stride()}"
        out_TE = torch.empty(num_rows, self._packed.num_outputs, dtype=torch.float32)
        self._function(self._packed.pointer, x_TD.data_ptr(), row_step, out_TE.data_ptr(), num_rows)
        return out_TE
