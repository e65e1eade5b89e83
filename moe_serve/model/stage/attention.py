"""The attention of one layer, without its norm and residual: two kinds with one interface.

T tokens, D model width, H query heads, L latent width, R rotated width of a latent query, P
positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from moe_kernels.interface.attention_shape import (
    AttentionShape,
    LatentShape,
    QKNormWeights,
    RotaryTable,
)
from moe_kernels.interface.kernels import AttentionCall, HeadLinear, Kernels, Linear
from moe_kernels.interface.kv_form import KVPages
from moe_serve.model.stage.adapter_rows import LayerAdditions
from moe_serve.model.stage.step_inputs import StepInputs


class Attention(Protocol):
    """Computes normed rows [T, D] -> the output projection's result.

    Writes the new keys and values. `additions`: of the adapters, to this layer.
    """

    def __call__(
        self,
        x_TD: Tensor,
        inputs: StepInputs,
        pages: KVPages,
        additions: LayerAdditions | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """Implements Attention: heads share keys and values in groups."""

    kernels: Kernels
    shape: AttentionShape
    qkv: Linear  # rows of q, then k, then v
    qk_norm: QKNormWeights | None
    sinks_H: Tensor | None  # fp32
    rotary: RotaryTable

    def __call__(
        self,
        x_TD: Tensor,
        inputs: StepInputs,
        pages: KVPages,
        additions: LayerAdditions | None = None,
    ) -> Tensor:
        call, norm = _call(self.rotary, inputs, pages, self.shape), self.qk_norm
        if additions is not None:
            norms = (None, None) if norm is None else (norm.q, norm.k)
            plan = additions.planned(call.plan, norms, self.sinks_H)
            call = replace(call, plan=plan)
        qkv = _adapted(additions, "qkv", self.qkv, x_TD)
        return self.kernels.attend(qkv, norm, self.sinks_H, call, self.shape)


def _adapted(additions: LayerAdditions | None, key: str, linear: Linear, x_TK: Tensor) -> Tensor:
    """Returns a linear layer's result with the additions of adapters."""
    out_TN = linear(x_TK)
    return out_TN if additions is None else additions.linear(key, x_TK, out_TN)


def _lifted(additions: LayerAdditions | None, key: str, up: HeadLinear, x_THK: Tensor) -> Tensor:
    """Returns the result of an up-projection, with the rows of fine-tunes that have their own."""
    out_THN = up(x_THK)
    return out_THN if additions is None else additions.lifted(key, x_THK, out_THN)


def _call(
    rotary: RotaryTable, inputs: StepInputs, pages: KVPages, shape: AttentionShape
) -> AttentionCall[Any]:
    plan = inputs.attention[shape]
    return AttentionCall(rotary, inputs.positions, inputs.kv_rows, pages, plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Implements Attention: all heads read one latent per token; see LatentShape."""

    kernels: Kernels
    shape: LatentShape
    absorbed: AttentionShape
    query_down: Linear | None  # projects to the query's own latent
    query_norm: Tensor | None
    query: Linear  # [T, H (nope + R)], each head's two parts together
    latent: Linear  # [T, L + R]
    latent_norm: Tensor
    key_up: HeadLinear  # [T, H, nope] -> [T, H, L]: the keys' up-projection, absorbed
    value_up: HeadLinear  # [T, H, L] -> [T, H, value_dim]
    rotary: RotaryTable
    query_scale_P: Tensor | None = None  # fp32: factor of each position's query

    def __call__(
        self,
        x_TD: Tensor,
        inputs: StepInputs,
        pages: KVPages,
        additions: LayerAdditions | None = None,
    ) -> Tensor:
        a, call, q = self.shape, _call(self.rotary, inputs, pages, self.absorbed), x_TD
        if additions is not None:
            call = replace(call, plan=additions.planned(call.plan, (self.latent_norm, None)))
        if self.query_down is not None and self.query_norm is not None:
            down = _adapted(additions, "query_down", self.query_down, x_TD)
            q = self.kernels.rms_norm(down, self.query_norm, a.norm_eps)
            if additions is not None:
                q = additions.normed("query", down, q, a.norm_eps)
        q = _adapted(additions, "query", self.query, q)
        if self.query_scale_P is not None:
            q = q * self.query_scale_P[inputs.positions][:, None].to(q.dtype)
        q_THC = q.view(len(x_TD), a.num_heads, -1)
        attended_THL = self.kernels.attend_latent(
            _lifted(additions, "key_up", self.key_up, q_THC[..., : a.nope_dim]),
            q_THC[..., a.nope_dim :],
            _adapted(additions, "latent", self.latent, x_TD),
            self.latent_norm,
            call,
            a,
        )
        return _lifted(additions, "value_up", self.value_up, attended_THL).flatten(1)
