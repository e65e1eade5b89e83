"""Kernels in plain torch: any device, no compiler. The reference set, and the fallback."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels.attention_plan import AttentionPlan, plan_attention
from moe_kernels.attention_shape import AttentionShape, QKNormWeights, RotaryTable, StepTokens
from moe_kernels.expert_mlp import ExpertMLP, routed_experts
from moe_kernels.kernels import ExpertBank, ExpertWeights, KVPages
from moe_kernels.linear import FastLinear, make_linear
from moe_kernels.norm import rms_norm, rotate
from moe_kernels.paged_attention import paged_attention
from moe_kernels.routing import route


class TorchExperts:
    """Implements ExpertBank: one MLP per activated expert."""

    def __init__(self, experts: Sequence[ExpertMLP | None]) -> None:
        self._experts = tuple(experts)

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return routed_experts(x_TD, expert_ids_TK, weights_TK, self._experts)


class TorchKernels:
    """Implements Kernels."""

    def __init__(self, name: str = "torch") -> None:
        self.name = name

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> FastLinear:
        return make_linear(weight_NK, bias_N)

    def experts(self, experts: Sequence[ExpertWeights | None]) -> ExpertBank:
        return TorchExperts(
            [None if e is None else ExpertMLP.from_weights(e.gate, e.up, e.down) for e in experts]
        )

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return rms_norm(x_TD, weight_D, eps)

    def plan_attention(
        self, step: StepTokens, shape: AttentionShape, device: torch.device
    ) -> AttentionPlan:
        return plan_attention(step, shape, device)

    def attend(
        self,
        qkv: Tensor,
        norm: QKNormWeights | None,
        rotary: RotaryTable,
        positions: Tensor,
        kv_rows: Tensor,
        pages: KVPages,
        plan: AttentionPlan,
        shape: AttentionShape,
    ) -> Tensor:
        q_THD, k_THD, v_THD = _heads(qkv, norm, shape)
        cos, sin = rotary.cos[positions][:, None], rotary.signed_sin[positions][:, None]
        keys = rotate(k_THD, cos, sin).to(qkv.dtype)
        for cache, new in ((pages.keys, keys), (pages.values, v_THD)):
            rows = new.reshape(-1, shape.head_dim)
            cache.view(-1, shape.head_dim).index_copy_(0, kv_rows, rows)
        q_THD = rotate(q_THD, cos, sin)
        out = paged_attention(q_THD, pages.keys, pages.values, plan, shape.scale)
        return out.flatten(1).to(qkv.dtype)

    def route(self, logits_TE: Tensor, top_k: int, is_renormalised: bool) -> tuple[Tensor, Tensor]:
        return route(logits_TE, top_k, is_renormalised)


def _heads(
    qkv: Tensor, norm: QKNormWeights | None, shape: AttentionShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Split, norm and clip -> q [T, H, D], k and v [T, Hkv, D]."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)
    if norm is not None and shape.qk_norm == "row":
        q = rms_norm(q.contiguous(), norm.q, shape.norm_eps)
        k = rms_norm(k.contiguous(), norm.k, shape.norm_eps)
    if shape.clip is not None:
        q, k, v = (t.clamp(-shape.clip, shape.clip) for t in (q, k, v))
    q, k, v = (t.reshape(len(qkv), -1, shape.head_dim) for t in (q, k, v))
    if norm is not None and shape.qk_norm == "head":
        q = rms_norm(q, norm.q, shape.norm_eps)
        k = rms_norm(k, norm.k, shape.norm_eps)
    return q, k, v
