"""Kernels in C++ for CPUs, fp32 and bf16: `cpu/*.cpp` through ctypes.

Each call passes pointers only; all possible checks run once, when a layer is made. T rows, D model
width, H query heads, Hkv key/value heads, K choices per row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_kernels.cpu import native_attention
from moe_kernels.cpu.cpu_library import (
    SUFFIXES,
    Float,
    Int,
    NativeLibrary,
    address,
    instruction_set,
)
from moe_kernels.cpu.native_adapters import NativeAdapterKernels
from moe_kernels.cpu.native_attention import NativePlan
from moe_kernels.cpu.native_drafting import NativeDrafting
from moe_kernels.cpu.native_experts import NativeSlots, native_experts
from moe_kernels.cpu.native_forms import native_layout
from moe_kernels.cpu.native_front import NativeFront
from moe_kernels.cpu.native_linear import NativeHeadLinear, NativeLinear, NativeRouterLinear
from moe_kernels.cpu.native_rank_calls import NativeRankCalls
from moe_kernels.cpu.native_signs import NativeExpertSigns, NativeSignedLinear
from moe_kernels.cpu.native_split_mlp import NativeSplitMLP
from moe_kernels.cpu.native_stack import NativeStack
from moe_kernels.interface.adapters import Rest, no_rest
from moe_kernels.interface.attention_shape import (
    AttentionShape,
    DecodeRoom,
    LatentShape,
    QKNormWeights,
    ReplannedAttention,
    StepRows,
)
from moe_kernels.interface.head_drafting import DraftingParts
from moe_kernels.interface.kernels import (
    AttentionCall,
    ExpertBank,
    ExpertWeights,
    GatedActivation,
    HeadLinear,
    Linear,
    RouterLinear,
)
from moe_kernels.interface.layer_front import LayerFrontParts
from moe_kernels.interface.layer_stack import StackParts
from moe_kernels.interface.quantised_matrix import (
    LowBitProducts,
    MatrixForm,
    PackedLayout,
    Weight,
)
from moe_kernels.interface.rank_kernels import RankKernels
from moe_kernels.interface.routing import RouterShape
from moe_kernels.interface.sign_matrix import SignedExpert, SignMatrix


class _RouterStruct(ctypes.Structure):
    """`Router` in cpu/router.cpp."""

    _fields_ = (
        *((name, Int) for name in (
            "num_experts", "top_k", "is_renormalised", "is_sigmoid", "num_groups",
            "num_groups_kept", "is_top2", "threads",
        )),
        ("renorm_floor", Float),
        ("scaling", Float),
    )  # fmt: skip


class NativeKernels:
    """Implements Kernels. `num_threads` is fixed at construction."""

    has_own_threads = True
    least_page_size = 16  # keys are packed sixteen at a time, all from one page
    has_packed_products = True
    has_packed_linears = True
    can_be_captured = False
    can_split_columns = True

    def __init__(
        self,
        library: ctypes.CDLL,
        dtype: torch.dtype,
        num_threads: int,
        low_bit_products: LowBitProducts = "exact",
    ) -> None:
        self.name = f"native C++ ({SUFFIXES[dtype]}, {instruction_set(library)})"
        self._native = NativeLibrary(library, dtype, num_threads, low_bit_products)
        self.adapters = NativeAdapterKernels(self._native, self._router)
        self._rms_norm = self._native.function("moe_rms_norm")
        self._add = self._native.function("moe_add")
        self._route, self._largest = library.moe_route, library.moe_largest
        self._num_found, self._found = 0, ((ctypes.c_float * 0)(), (ctypes.c_int64 * 0)())
        self._routers: dict[RouterShape, _RouterStruct] = {}

    def packed_layout(self, form: MatrixForm) -> PackedLayout | str:
        return native_layout(form, self._native.low_bit_products)

    def linear_layout(self, form: MatrixForm) -> PackedLayout | str:
        return self.packed_layout(form)

    def linear(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Linear:
        return NativeLinear(self._native, weight_NK, bias_N)

    def head_linear(self, weight_HNK: Tensor) -> HeadLinear:
        return NativeHeadLinear(self._native, weight_HNK)

    def router_linear(self, weight_ED: Tensor, bias_E: Tensor | None = None) -> RouterLinear:
        return NativeRouterLinear(self._native, weight_ED, bias_E)

    def experts(
        self, experts: Sequence[ExpertWeights | None], activation: GatedActivation
    ) -> ExpertBank:
        return native_experts(self._native, experts, activation)

    def expert_slots(
        self, sample: ExpertWeights, activation: GatedActivation, max_bytes: int, most: int
    ) -> NativeSlots:
        return NativeSlots(self._native, sample, activation, max_bytes, most)

    def split_mlp(self, weights: ExpertWeights, activation: GatedActivation) -> NativeSplitMLP:
        return NativeSplitMLP(self._native, weights, activation)

    def signed_linear(self, base: Linear, added: SignMatrix) -> NativeSignedLinear:
        return NativeSignedLinear(self._native, base, added)

    def expert_signs(
        self, added: Mapping[int, SignedExpert], is_changed_E: Tensor, rest: Rest = no_rest
    ) -> NativeExpertSigns:
        return NativeExpertSigns(added, is_changed_E, rest)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        num_rows, width = x_TD.shape
        assert x_TD.stride(1) == 1, f"rows of the input must be contiguous, not {x_TD.stride()}"
        out_TD = x_TD.new_empty(num_rows, width)
        self._rms_norm(
            x_TD.data_ptr(), x_TD.stride(0), weight_D.data_ptr(), out_TD.data_ptr(), num_rows,
            width, eps, self._native.threads,
        )  # fmt: skip
        return out_TD

    def plan_attention(
        self, step: StepRows, shape: AttentionShape, device: torch.device
    ) -> NativePlan:
        return NativePlan(step, shape, self._native.threads)

    def fixed_attention(
        self, room: DecodeRoom, shape: AttentionShape, device: torch.device
    ) -> ReplannedAttention:
        return ReplannedAttention(lambda step: self.plan_attention(step, shape, device))

    def attend(
        self,
        qkv: Tensor,
        norm: QKNormWeights | None,
        sinks_H: Tensor | None,
        call: AttentionCall[NativePlan],
        shape: AttentionShape,
    ) -> Tensor:
        return native_attention.attend(self._native, qkv, norm, sinks_H, call, shape)

    def attend_latent(
        self,
        q_latent_THL: Tensor,
        q_rope_THR: Tensor,
        latent_TC: Tensor,
        norm_weight_L: Tensor,
        call: AttentionCall[NativePlan],
        shape: LatentShape,
    ) -> Tensor:
        return native_attention.attend_latent(
            self._native, q_latent_THL, q_rope_THR, latent_TC, norm_weight_L, call, shape
        )

    def route(
        self, logits_TE: Tensor, shape: RouterShape, selection_bias_E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        router = self._router(shape)
        num_rows = logits_TE.shape[0]
        ids_TK = torch.empty(num_rows, shape.top_k, dtype=torch.int64)
        weights_TK = torch.empty(num_rows, shape.top_k, dtype=torch.float32)
        self._route(
            ctypes.addressof(router), logits_TE.data_ptr(), address(selection_bias_E),
            ids_TK.data_ptr(), weights_TK.data_ptr(), num_rows,
        )  # fmt: skip
        return ids_TK, weights_TK

    def layer_front(self, parts: LayerFrontParts) -> NativeFront:
        shape = parts.router_shape
        return NativeFront(self._native, parts, None if shape is None else self._router(shape))

    def layer_stack(self, parts: StackParts) -> NativeStack | None:
        """Returns the parts as one call; None if the head is a shard's, which gathers columns."""
        is_native = isinstance(parts.head, NativeLinear)
        return NativeStack(self._native, parts) if is_native else None

    def rank_calls(self) -> RankKernels:
        return NativeRankCalls(self._native, self._router)

    def largest(self, x_RN: Tensor) -> tuple[list[float], list[int]]:
        assert x_RN.is_contiguous() and x_RN.dtype == torch.float32, f"rows of {x_RN.dtype}"
        num_rows, width = x_RN.shape
        if num_rows != self._num_found:  # making the types takes longer than a call
            self._found = (ctypes.c_float * num_rows)(), (ctypes.c_int64 * num_rows)()
            self._num_found = num_rows
        values, places = self._found
        self._largest(x_RN.data_ptr(), places, values, num_rows, width, self._native.threads)
        return values[:], places[:]

    def drafting(self, parts: DraftingParts) -> NativeDrafting | None:
        is_native = isinstance(parts.output, NativeLinear)  # a shard's head gathers its columns
        return NativeDrafting(self._native, parts) if is_native else None

    def for_drafts(self) -> NativeKernels:
        native = self._native
        return NativeKernels(native.library, native.dtype, native.threads, "int8")

    def token_sampler(self) -> None:
        return None

    def add(self, hidden_TD: Tensor, out_TD: Tensor, more_TD: Tensor | None) -> Tensor:
        result_TD = torch.empty_like(hidden_TD)
        self._add(
            hidden_TD.data_ptr(), out_TD.data_ptr(), address(more_TD), result_TD.data_ptr(),
            hidden_TD.numel(), self._native.threads,
        )  # fmt: skip
        return result_TD

    def _router(self, shape: RouterShape) -> _RouterStruct:
        router = self._routers.get(shape)
        if router is None:
            router = self._routers[shape] = _router_struct(shape, self._native.threads)
        return router


def _router_struct(shape: RouterShape, threads: int) -> _RouterStruct:
    return _RouterStruct(
        shape.num_experts, shape.top_k, shape.is_renormalised, shape.scoring == "sigmoid",
        shape.num_groups, shape.num_groups_kept, shape.group_score == "top2", threads,
        shape.renorm_floor, shape.scaling,
    )  # fmt: skip
