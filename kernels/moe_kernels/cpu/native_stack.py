"""All layers of a model in the native kernels: one call for a step.

S sequences, T tokens, R rows of logits, D model width, V vocabulary, L layers, K choices per row.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from moe_kernels.cpu.cpu_library import Float, Int, NativeLibrary, Pointer, address
from moe_kernels.cpu.native_attention import PlanStruct, pages_struct, plan_struct
from moe_kernels.cpu.native_experts import ExpertTable, absence
from moe_kernels.cpu.native_front import NativeFront
from moe_kernels.cpu.native_linear import NativeLinear
from moe_kernels.cpu.native_rows import NativeRows
from moe_kernels.interface.layer_stack import CLOCKS, StackParts, StackResult, StackRows


class _LayerStruct(ctypes.Structure):
    """`StackLayer` in cpu/source/calls/stack.cpp."""

    _fields_ = (
        *((name, Pointer) for name in ("front", "experts", "mlp", "pages")),
        ("shape", Int),
    )


class _StackStruct(ctypes.Structure):
    """`Stack` in cpu/source/calls/stack.cpp."""

    _fields_ = (
        *((name, Pointer) for name in ("embedding", "final_norm", "head", "layers", "shapes")),
        *((name, Int) for name in (
            "num_layers", "num_shapes", "width", "vocab_size", "top_k", "threads",
        )),
        ("eps", ctypes.c_double),
        ("logits_divisor", Float),
    )  # fmt: skip


class _StepStruct(ctypes.Structure):
    """`StackStep` in cpu/source/calls/stack.cpp."""

    _fields_ = (
        *((name, Pointer) for name in (
            "slices", "tokens", "pages", "logits", "hidden", "ids", "weights", "times", "at_layer",
            "adapters",
        )),
        *((name, Int) for name in ("num_slices", "num_tokens", "num_logits", "first", "end")),
    )  # fmt: skip


class NativeStack:
    """Implements LayerStack."""

    def __init__(self, native: NativeLibrary, parts: StackParts) -> None:
        self._function, self._parts, self._dtype = native.function("moe_stack"), parts, native.dtype
        self._vocab_size, self._width = parts.embedding_VD.shape
        for tensor in (parts.embedding_VD, parts.final_norm_D):
            assert tensor.is_contiguous() and tensor.dtype == native.dtype, "weights in one piece"
        head = parts.head
        assert isinstance(head, NativeLinear) and head.num_outputs == self._vocab_size, "a head"
        shapes = list(dict.fromkeys(layer.shape for layer in parts.layers))
        structs = [plan_struct(shape, parts.page_size, native.threads) for shape in shapes]
        self._shapes = (PlanStruct * len(shapes))(*structs)
        self._layers = (_LayerStruct * len(parts.layers))()
        self._is_sparse = [layer.experts is not None for layer in parts.layers]
        self._pages = [pages_struct(layer.pages) for layer in parts.layers]
        for struct, layer, pages in zip(self._layers, parts.layers, self._pages, strict=True):
            assert isinstance(layer.front, NativeFront), "a native front"
            assert layer.experts is not None or layer.mlp is not None, "a layer has experts or MLP"
            struct.front = layer.front.pointer
            struct.experts, struct.mlp = _bank(layer.experts), _bank(layer.mlp)
            struct.pages = ctypes.addressof(pages)
            struct.shape = shapes.index(layer.shape)
        self._struct = _StackStruct(
            parts.embedding_VD.data_ptr(),
            parts.final_norm_D.data_ptr(),
            head.pointer,
            ctypes.addressof(self._layers),
            ctypes.addressof(self._shapes),
            len(parts.layers),
            len(shapes),
            self._width,
            self._vocab_size,
            parts.top_k,
            native.threads,
            parts.norm_eps,
            parts.logits_divisor,
        )
        self._at_layer = ctypes.c_int64(0)
        self._step = _StepStruct(at_layer=ctypes.addressof(self._at_layer))
        self._pointers = ctypes.addressof(self._struct), ctypes.addressof(self._step)

    @property
    def at_layer(self) -> int:
        """See `LayerStack.at_layer`."""
        return self._at_layer.value

    def __call__(
        self,
        rows: StackRows,
        *,
        has_choices: bool = False,
        has_times: bool = False,
        layers: tuple[int, int] | None = None,
        hidden_TD: Tensor | None = None,
        adapters: NativeRows | None = None,
    ) -> StackResult:
        step, num_tokens = self._step, len(rows.tokens)
        first, end = (0, len(self._layers)) if layers is None else layers
        if hidden_TD is None:
            assert first == 0, f"layer {first} needs the rows of the layer before"
            hidden_TD = torch.empty(num_tokens, self._width, dtype=self._dtype)
        else:
            assert hidden_TD.shape == (num_tokens, self._width), "a state for each token"
            assert hidden_TD.is_contiguous() and hidden_TD.dtype == self._dtype, "in one piece"
        num_logits = rows.num_logits if end == len(self._layers) else 0
        logits_RV = torch.empty(num_logits, self._vocab_size, dtype=torch.float32)
        ids_LTK = weights_LTK = times = None
        if has_choices:
            shape = (sum(self._is_sparse[first:end]), num_tokens, self._parts.top_k)
            ids_LTK = torch.empty(shape, dtype=torch.int64)
            weights_LTK = torch.empty(shape, dtype=torch.float32)
        if has_times:
            times = np.empty((end - first, CLOCKS), dtype=np.int64)
        step.slices, num_numbers = rows.slices.buffer_info()
        step.tokens, step.pages = rows.tokens.buffer_info()[0], rows.pages.buffer_info()[0]
        step.logits, step.hidden = logits_RV.data_ptr(), hidden_TD.data_ptr()
        step.ids, step.weights = address(ids_LTK), address(weights_LTK)
        step.times = None if times is None else times.ctypes.data
        step.adapters = None if adapters is None else adapters.pointer
        step.num_slices, step.num_tokens = num_numbers // 5, num_tokens
        step.num_logits, step.first, step.end = num_logits, first, end
        absent = self._function(*self._pointers)
        assert not absent, absence(absent)
        return StackResult(logits_RV, hidden_TD, ids_LTK, weights_LTK, times)


def _bank(bank: object) -> int | None:
    if bank is None:
        return None
    assert isinstance(bank, ExpertTable), f"native experts, not {type(bank).__name__}"
    return bank.pointer
