"""The adapters of some rows, as the native kernels read them.

T rows, K inputs, N outputs, H heads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.cpu.cpu_library import Int, NativeLibrary, Pointer, address
from moe_kernels.cpu.native_attention import NativePlan
from moe_kernels.cpu.native_changes import HEADS, MATRICES, NORMS
from moe_kernels.interface.adapters import RowAdditions
from moe_kernels.interface.routing import RouterShape


class _RowsStruct(ctypes.Structure):
    """`RowAdapters` in cpu/source/adapters.h."""

    _fields_ = (
        *((name, Pointer) for name in ("adapter", "order", "starts", "layers", "models")),
        ("num_adapters", Int),
    )


class NativeRows:
    """The adapters of a step's rows."""

    def __init__(
        self,
        index_T: NDArray[np.int64],
        layers: Sequence[int],
        kept: object,
        models: Sequence[int | None] | None = None,
    ) -> None:
        """`layers`: the address of each adapter's array of LayerChanges; `models`: that of its
        ModelTune."""
        counts = np.bincount(index_T + 1, minlength=len(layers) + 1)
        order = np.argsort(index_T, kind="stable")[counts[0] :]
        starts = np.cumsum(counts) - counts[0]
        pointers = (ctypes.c_void_p * len(layers))(*layers)
        tunes = None if models is None else (ctypes.c_void_p * len(layers))(*models)
        self._kept = (index_T, order, starts, pointers, tunes, kept)
        self._struct = _RowsStruct(
            index_T.ctypes.data, order.ctypes.data, starts.ctypes.data,
            ctypes.addressof(pointers), None if tunes is None else ctypes.addressof(tunes),
            len(layers),
        )  # fmt: skip
        self.pointer = ctypes.addressof(self._struct)


class NativeStepRows(NativeRows):
    """Implements AdaptedRows: each method is a call or two, whatever the number of adapters."""

    def __init__(
        self,
        native: NativeLibrary,
        router: Callable[[RouterShape], ctypes.Structure],
        index_T: NDArray[np.int64],
        layers: Sequence[int],
        kept: object,
        models: Sequence[int | None],
    ) -> None:
        super().__init__(index_T, layers, kept, models)
        self._native, self._router, self._num_rows = native, router, len(index_T)

    def add(self, layer: int, linear: str, x_TK: Tensor, y_TN: Tensor) -> Tensor:
        assert x_TK.stride(1) == 1, f"rows of the input must be contiguous, not {x_TK.stride()}"
        y_TN = y_TN.contiguous()
        for name in ("moe_low_rank", "moe_row_signs"):
            self._native.function(name)(
                self.pointer, layer, MATRICES[linear], x_TK.data_ptr(), x_TK.stride(0),
                y_TN.data_ptr(), self._native.threads,
            )  # fmt: skip
        return y_TN

    def normed(self, layer: int, norm: str, x_TD: Tensor, y_TD: Tensor, eps: float) -> Tensor:
        assert x_TD.stride(1) == 1 and y_TD.is_contiguous(), f"rows lie at {x_TD.stride()}"
        self._native.function("moe_row_norms")(
            self.pointer, layer, NORMS[norm], x_TD.data_ptr(), x_TD.stride(0), y_TD.data_ptr(),
            y_TD.shape[1], eps, self._native.threads,
        )  # fmt: skip
        return y_TD

    def lifted(self, layer: int, up: str, x_THK: Tensor, y_THN: Tensor) -> Tensor:
        assert x_THK.stride(2) == 1 and y_THN.is_contiguous(), f"heads lie at {x_THK.stride()}"
        self._native.function("moe_row_heads")(
            self.pointer, layer, HEADS[up], x_THK.data_ptr(), *x_THK.stride()[:2], y_THN.data_ptr()
        )
        return y_THN

    def planned(
        self,
        layer: int,
        plan: NativePlan,
        norms: tuple[Tensor | None, Tensor | None],
        sinks_H: Tensor | None,
    ) -> NativePlan:
        own_T3 = np.empty((self._num_rows, 3), dtype=np.uintp)
        is_own = self._native.library.moe_row_attended(
            self.pointer, layer, *(address(each) for each in (*norms, sinks_H)), own_T3.ctypes.data,
            self._num_rows,
        )  # fmt: skip
        return plan.with_own(own_T3) if is_own else plan

    def routed(
        self, layer: int, shape: RouterShape, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> None:
        assert x_TD.is_contiguous(), f"rows lie at {x_TD.stride()}"
        self._native.function("moe_row_routes")(
            self.pointer, layer, ctypes.addressof(self._router(shape)), x_TD.data_ptr(),
            x_TD.shape[1], shape.num_experts, shape.top_k, ids_TK.data_ptr(), weights_TK.data_ptr(),
        )  # fmt: skip


def rows_of_additions(additions: RowAdditions) -> NativeRows:
    """Prepares additions to one layer for a bank, as layer 0 of adapters."""
    prepared = additions.additions
    return NativeRows(additions.index_T, [each.layer_pointer for each in prepared], prepared)
