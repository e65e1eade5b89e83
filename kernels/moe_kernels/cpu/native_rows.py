"""The adapters of some rows, as the native kernels read them. T rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moe_kernels.cpu.cpu_library import Int, Pointer
from moe_kernels.interface.adapters import RowAdditions


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


def rows_of_additions(additions: RowAdditions) -> NativeRows:
    """Prepares additions to one layer for a bank, as layer 0 of adapters."""
    prepared = additions.additions
    return NativeRows(additions.index_T, [each.layer_pointer for each in prepared], prepared)
