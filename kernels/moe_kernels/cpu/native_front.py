"""The first half of a layer in the native kernels: one call up to the router's choice.

T rows, D model width, K choices per row.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moe_kernels.cpu.cpu_library import Int, NativeLibrary, Pointer, address
from moe_kernels.cpu.native_attention import NativePlan, PagesStruct, pages_struct
from moe_kernels.cpu.native_linear import NativeLinear, NativeRouterLinear
from moe_kernels.cpu.native_rows import NativeRows
from moe_kernels.interface.kv_form import KVPages
from moe_kernels.interface.layer_front import FrontResult, LayerFrontParts


class _FrontStruct(ctypes.Structure):
    """`Front` in cpu/source/calls/front.h."""

    _fields_ = (
        *((name, Pointer) for name in (
            "attention_norm", "moe_norm", "q_norm", "k_norm", "sinks", "cos", "sin", "query_scale",
            "selection_bias", "qkv", "output", "router", "route",
        )),
        *((name, Int) for name in (
            "width", "qkv_width", "attended_width", "num_experts", "top_k", "threads",
        )),
        ("eps", ctypes.c_double),
    )  # fmt: skip


class NativeFront:
    """Implements LayerFront."""

    __slots__ = ("_function", "_pages", "_parts", "_struct", "_top_k", "pointer")

    def __init__(
        self, native: NativeLibrary, parts: LayerFrontParts, route: ctypes.Structure | None
    ) -> None:
        qkv, output, router = parts.qkv, parts.output, parts.router
        assert isinstance(qkv, NativeLinear) and isinstance(output, NativeLinear), "native layers"
        assert router is None or isinstance(router, NativeRouterLinear), "a native router"
        shape, norm = parts.shape, parts.qk_norm
        self._function, self._parts = native.function("moe_front"), (parts, route)
        self._top_k = None if parts.router_shape is None else parts.router_shape.top_k
        self._struct = _FrontStruct(
            parts.attention_norm.data_ptr(),
            parts.moe_norm.data_ptr(),
            None if norm is None else norm.q.data_ptr(),
            None if norm is None else norm.k.data_ptr(),
            address(parts.sinks_H),
            parts.rotary.cos.data_ptr(),
            parts.rotary.signed_sin.data_ptr(),
            address(parts.rotary.query_scale),
            address(parts.selection_bias_E),
            qkv.pointer,
            output.pointer,
            None if router is None else router.pointer,
            None if route is None else ctypes.addressof(route),
            parts.attention_norm.shape[0],
            qkv.num_outputs,
            shape.num_heads * shape.value_width,
            0 if parts.router_shape is None else parts.router_shape.num_experts,
            self._top_k or 0,
            native.threads,
            parts.norm_eps,
        )
        self.pointer = ctypes.addressof(self._struct)
        self._pages: tuple[KVPages, PagesStruct] | None = None

    def __call__(
        self,
        hidden_TD: Tensor,
        positions: Tensor,
        kv_rows: Tensor,
        pages: KVPages,
        plan: NativePlan,
        adapters: NativeRows | None = None,
        layer: int = 0,
    ) -> FrontResult:
        assert hidden_TD.is_contiguous(), f"the residual stream has strides {hidden_TD.stride()}"
        num_rows = hidden_TD.shape[0]
        out_TD, x_TD = torch.empty_like(hidden_TD), torch.empty_like(hidden_TD)
        ids_TK = weights_TK = None
        if self._top_k is not None:
            ids_TK = torch.empty(num_rows, self._top_k, dtype=torch.int64)
            weights_TK = torch.empty(num_rows, self._top_k, dtype=torch.float32)
        self._function(
            self.pointer,
            plan.pointer,
            hidden_TD.data_ptr(),
            positions.data_ptr(),
            kv_rows.data_ptr(),
            ctypes.addressof(self.pages_struct(pages)),
            out_TD.data_ptr(),
            x_TD.data_ptr(),
            address(ids_TK),
            address(weights_TK),
            num_rows,
            None if adapters is None else adapters.pointer,
            layer,
        )
        return FrontResult(out_TD, x_TD, ids_TK, weights_TK)

    def pages_struct(self, pages: KVPages) -> PagesStruct:
        """Returns where the pages lie: a layer is mostly called with the same ones."""
        if self._pages is None or self._pages[0] is not pages:
            self._pages = pages, pages_struct(pages)
        return self._pages[1]
