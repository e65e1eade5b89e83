"""Kernels in C++ for CPUs, fp32 and bf16: `cpu/*.cpp` through ctypes.

Weights stay in their row-major layout, in huge pages where the system gives them. Each call is a
pointer hand-over; whatever can be checked is checked when a layer is made, not per call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_kernels.attention_shape import (
    AttentionShape,
    LatentShape,
    QKNormWeights,
    RotaryTable,
    StepTokens,
)
from moe_kernels.kernels import (
    ExpertBank,
    ExpertWeights,
    GatedActivation,
    HeadLinear,
    KVPages,
    Linear,
    RouterLinear,
)
from moe_kernels.routing import RouterShape
from moe_kernels.torch_kernels import TorchHeadLinear, TorchRouterLinear

_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_NORMS = {"none": 0, "head": 1, "row": 2}


class NativeLinear:
    """Implements Linear."""

    __slots__ = ("_bias", "_function", "_threads", "_weight")

    def __init__(self, kernels: NativeKernels, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self._function = kernels.function("moe_linear")
        self._weight, self._threads = kernels.own(weight_NK), kernels.num_threads
        self._bias = None if bias_N is None else bias_N.contiguous()

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        num_outputs, width = self._weight.shape
        x_TK = x_TK.contiguous()
        out_TN = x_TK.new_empty(x_TK.shape[0], num_outputs)
        self._function(
            x_TK.data_ptr(),
            self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            None if residual_TN is None else residual_TN.data_ptr(),
            out_TN.data_ptr(),
            x_TK.shape[0],
            num_outputs,
            width,
            self._threads,
        )
        return out_TN


class NativeExperts:
    """Implements ExpertBank. Gate and up lie together, [2 F, D] for each expert."""

    def __init__(self, kernels: NativeKernels, experts: Sequence[ExpertWeights | None]) -> None:
        self._function = kernels.function("moe_experts")
        self._threads, self._num_experts = kernels.num_threads, len(experts)
        here = [e for e in experts if e is not None]
        assert here, "a bank without experts has nothing to compute"
        f, d = here[0].gate.shape
        self._gate_up = kernels.own_empty((len(here), 2 * f, d))
        self._down = kernels.own_empty((len(here), d, f))
        gate_up: list[int | None] = [None] * len(experts)
        down: list[int | None] = [None] * len(experts)
        slot = 0
        for expert_id, expert in enumerate(experts):
            if expert is not None:
                self._gate_up[slot, :f], self._gate_up[slot, f:] = expert.gate, expert.up
                self._down[slot] = expert.down
                gate_up[expert_id] = self._gate_up[slot].data_ptr()
                down[expert_id] = self._down[slot].data_ptr()
                slot += 1
        self._gate_up_pointers = (ctypes.c_void_p * len(experts))(*gate_up)
        self._down_pointers = (ctypes.c_void_p * len(experts))(*down)

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        (num_rows, top_k), d = expert_ids_TK.shape, x_TD.shape[1]
        f = self._down.shape[2]
        hidden = x_TD.new_empty(num_rows * top_k * f)
        y = torch.empty(num_rows * top_k * d, dtype=torch.float32)
        out_TD = torch.empty(num_rows, d, dtype=torch.float32)
        absent = self._function(
            x_TD.data_ptr(),
            expert_ids_TK.data_ptr(),
            weights_TK.data_ptr(),
            self._gate_up_pointers,
            self._down_pointers,
            hidden.data_ptr(),
            y.data_ptr(),
            out_TD.data_ptr(),
            num_rows,
            top_k,
            self._num_experts,
            d,
            f,
            self._threads,
        )
        assert not absent, f"rows were sent for expert {absent - 1}, which is not here"
        return out_TD


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Which sequence each token belongs to [T], and the page tables [S, most pages]."""

    sequences: Tensor
    tables: Tensor
    page_size: int


class NativeKernels:
    """Implements Kernels. `num_threads` is fixed at construction."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self._library, self._dtype = library, dtype
        self.num_threads = num_threads
        self.name = f"native C++ ({_SUFFIXES[dtype]})"
        self._rms_norm = self.function("moe_rms_norm")
        self._split_heads = self.function("moe_split_heads")
        self._attention = self.function("moe_attention")
        self._route = library.moe_route_f32

    def function(self, name: str) -> ctypes._NamedFuncPointer:
        """The library's function for this dtype."""
        found: ctypes._NamedFuncPointer = getattr(self._library, f"{name}_{_SUFFIXES[self._dtype]}")
        return found

    def own_empty(self, shape: tuple[int, ...]) -> Tensor:
        """Fresh memory of this dtype, in huge pages where they are to be had."""
        tensor = torch.empty(shape, dtype=self._dtype)
        self._library.moe_advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def own(self, tensor: Tensor) -> Tensor:
        """A contiguous copy (the original may be a view of a mapped file)."""
        assert tensor.dtype == self._dtype, f"{tensor.dtype} weight for {self._dtype} kernels"
        return self.own_empty(tuple(tensor.shape)).copy_(tensor)

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        return NativeLinear(self, weight_NK, bias_N)

    def head_linear(self, weight_HNK: Tensor) -> HeadLinear:
        return TorchHeadLinear(weight_HNK)

    def router_linear(self, weight_ED: Tensor, bias_E: Tensor | None = None) -> RouterLinear:
        return TorchRouterLinear(weight_ED, bias_E)

    def experts(
        self, experts: Sequence[ExpertWeights | None], activation: GatedActivation
    ) -> ExpertBank:
        return NativeExperts(self, experts)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        out_TD = torch.empty_like(x_TD)
        self._rms_norm(
            x_TD.data_ptr(), weight_D.data_ptr(), out_TD.data_ptr(), *x_TD.shape, eps,
            self.num_threads,
        )  # fmt: skip
        return out_TD

    def plan_attention(
        self, step: StepTokens, shape: AttentionShape, device: torch.device
    ) -> NativePlan:
        most = max(len(table) for table in step.page_tables)
        tables = np.zeros((len(step.page_tables), most), dtype=np.int64)
        for row, table in zip(tables, step.page_tables, strict=True):
            row[: len(table)] = table
        sequences = np.repeat(np.arange(len(tables)), step.query_lens)
        return NativePlan(torch.from_numpy(sequences), torch.from_numpy(tables), step.page_size)

    def attend(
        self,
        qkv: Tensor,
        norm: QKNormWeights | None,
        sinks_H: Tensor | None,
        rotary: RotaryTable,
        positions: Tensor,
        kv_rows: Tensor,
        pages: KVPages,
        plan: NativePlan,
        shape: AttentionShape,
    ) -> Tensor:
        num_tokens, q_size = qkv.shape[0], shape.num_heads * shape.head_dim
        q = torch.empty(num_tokens, q_size, dtype=torch.float32)
        out = qkv.new_empty(num_tokens, q_size)
        sizes = (num_tokens, shape.num_heads, shape.num_kv_heads, shape.head_dim)
        keys, values = pages.keys.data_ptr(), pages.values.data_ptr()
        self._split_heads(
            qkv.data_ptr(),
            None if norm is None else norm.q.data_ptr(),
            None if norm is None else norm.k.data_ptr(),
            rotary.cos.data_ptr(),
            rotary.signed_sin.data_ptr(),
            positions.data_ptr(),
            kv_rows.data_ptr(),
            keys,
            values,
            q.data_ptr(),
            *sizes,
            _NORMS[shape.qk_norm],
            shape.norm_eps,
            shape.clip or 0.0,
            self.num_threads,
        )
        self._attention(
            q.data_ptr(),
            keys,
            values,
            plan.sequences.data_ptr(),
            positions.data_ptr(),
            plan.tables.data_ptr(),
            out.data_ptr(),
            *sizes,
            plan.page_size,
            plan.tables.shape[1],
            shape.scale,
            shape.sliding_window or 0,
            self.num_threads,
        )
        return out

    def attend_latent(
        self,
        q_latent_THL: Tensor,
        q_rope_THR: Tensor,
        latent_TC: Tensor,
        norm_weight_L: Tensor,
        rotary: RotaryTable,
        positions: Tensor,
        kv_rows: Tensor,
        pages: KVPages,
        plan: NativePlan,
        shape: LatentShape,
    ) -> Tensor:
        raise NotImplementedError

    def route(
        self, logits_TE: Tensor, shape: RouterShape, selection_bias_E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        num_rows, num_experts = logits_TE.shape
        ids_TK = torch.empty(num_rows, shape.top_k, dtype=torch.int64)
        weights_TK = torch.empty(num_rows, shape.top_k, dtype=torch.float32)
        self._route(
            logits_TE.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr(), num_rows, num_experts,
            shape.top_k, int(shape.is_renormalised), self.num_threads,
        )  # fmt: skip
        return ids_TK, weights_TK
