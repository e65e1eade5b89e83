"""The attention stage: everything of a model but its routed experts.

T tokens of a micro-batch, D model width, H query heads, Hkv key/value heads, V vocabulary.
Holds weights and nothing else; keys and values live in the `KVCache` that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from experts.routed_rows import RoutedRows
from moe_kernels.linear import FastLinear
from moe_kernels.norm import rms_norm, rotary_table, rotate
from moe_kernels.paged_attention import paged_attention
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.router import route
from moe_serve.model.spec import ModelSpec
from moe_serve.model.step_inputs import StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One layer's weights. `qk_norm` is [H + Hkv, D] for the norm over heads, else by row."""

    attention_norm: Tensor
    qkv: FastLinear  # rows of q, then k, then v
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: FastLinear
    moe_norm: Tensor
    router: FastLinear


class AttentionStage:
    """Embedding, attention and routing of each layer, final norm and head."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: Tensor,
        layers: Sequence[AttentionLayer],
        final_norm: Tensor,
        head: FastLinear,
        max_positions: int,
    ) -> None:
        self.spec = spec
        self._embedding, self._layers = embedding, tuple(layers)
        self._final_norm, self._head = final_norm, head
        dim = spec.attention.head_dim
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        frequencies = 1.0 / (spec.rope.theta**exponents) / spec.rope.factor
        angles = torch.arange(max_positions).float()[:, None] * frequencies[None]
        cos, sin = rotary_table(angles)
        self._cos, self._sin = cos.to(embedding.device), sin.to(embedding.device)

    def embed(self, inputs: StepInputs) -> Tensor:
        """-> the residual stream [T, D]."""
        return F.embedding(inputs.token_ids, self._embedding)

    def rotary(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """cos and signed sin [T, 1, D] of the step's positions: the same for every layer."""
        return self._cos[inputs.positions], self._sin[inputs.positions]

    def attend(
        self,
        layer: int,
        hidden_TD: Tensor,
        inputs: StepInputs,
        rotary: tuple[Tensor, Tensor],
        cache: KVCache,
    ) -> Tensor:
        """Norm, attention over the pages, residual -> [T, D]. Writes the new keys and values."""
        weights, a = self._layers[layer], self.spec.attention
        qkv = weights.qkv(rms_norm(hidden_TD, weights.attention_norm, self.spec.norm_eps))
        q_THD, k_THD, v_THD = self._heads(weights, qkv)
        cache.write(layer, inputs.kv_rows, rotate(k_THD, *rotary).to(qkv.dtype), v_THD)
        out_THD = paged_attention(
            rotate(q_THD, *rotary),
            cache.keys[layer],
            cache.values[layer],
            inputs.attention,
            a.head_dim**-0.5,
        )
        return hidden_TD + weights.output(out_THD.flatten(1).to(qkv.dtype))

    def route(self, layer: int, hidden_TD: Tensor) -> RoutedRows:
        """Norm and router: what goes to the experts."""
        weights = self._layers[layer]
        x_TD = rms_norm(hidden_TD, weights.moe_norm, self.spec.norm_eps)
        return route(x_TD, weights.router, self.spec.router)

    def logits(self, hidden_TD: Tensor, rows: Tensor) -> Tensor:
        """Final norm and head of some rows -> [rows, V] in fp32."""
        chosen = rms_norm(hidden_TD.index_select(0, rows), self._final_norm, self.spec.norm_eps)
        return self._head(chosen).float()

    def _heads(self, weights: AttentionLayer, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split, norm and clip -> q [T, H, D], k and v [T, Hkv, D]."""
        a, eps = self.spec.attention, self.spec.norm_eps
        q_size, kv_size = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)
        if a.qk_norm == "row":
            assert weights.q_norm is not None and weights.k_norm is not None, "row norm has weights"
            q, k = (
                rms_norm(t.contiguous(), w, eps)
                for t, w in ((q, weights.q_norm), (k, weights.k_norm))
            )
        if a.clip is not None:
            q, k, v = (t.clamp(-a.clip, a.clip) for t in (q, k, v))
        heads = [t.reshape(len(qkv), -1, a.head_dim) for t in (q, k, v)]
        if a.qk_norm == "head":
            assert weights.q_norm is not None and weights.k_norm is not None, (
                "head norm has weights"
            )
            heads[0] = rms_norm(heads[0], weights.q_norm, eps)
            heads[1] = rms_norm(heads[1], weights.k_norm, eps)
        return heads[0], heads[1], heads[2]
