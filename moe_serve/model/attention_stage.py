"""The attention stage: everything of a model but its routed experts.

T tokens of a micro-batch, D model width, V vocabulary. Holds weights and nothing else; keys and
values live in the `KVCache` that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from experts.routed_rows import RoutedRows
from moe_kernels.attention_shape import QKNormWeights, RotaryTable
from moe_kernels.kernels import Kernels, Linear
from moe_kernels.norm import rotary_table
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.spec import ModelSpec, RopeSpec
from moe_serve.model.step_inputs import StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One layer's weights."""

    attention_norm: Tensor
    qkv: Linear  # rows of q, then k, then v
    qk_norm: QKNormWeights | None
    output: Linear
    moe_norm: Tensor
    router: Linear


class AttentionStage:
    """Embedding, attention and routing of each layer, final norm and head."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        *,
        embedding: Tensor,
        layers: Sequence[AttentionLayer],
        final_norm: Tensor,
        head: Linear,
        max_positions: int,
    ) -> None:
        self.spec, self.kernels = spec, kernels
        self._embedding, self._layers = embedding, tuple(layers)
        self._final_norm, self._head = final_norm, head
        self._rotary = _rotary(spec.rope, spec.attention.head_dim, max_positions, embedding.device)

    def embed(self, inputs: StepInputs) -> Tensor:
        """-> the residual stream [T, D]."""
        return F.embedding(inputs.token_ids, self._embedding)

    def attend(self, layer: int, hidden_TD: Tensor, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Norm, attention over the pages, residual -> [T, D]. Writes the new keys and values."""
        weights, kernels = self._layers[layer], self.kernels
        x_TD = kernels.rms_norm(hidden_TD, weights.attention_norm, self.spec.norm_eps)
        attended = kernels.attend(
            weights.qkv(x_TD),
            weights.qk_norm,
            self._rotary,
            inputs.positions,
            inputs.kv_rows,
            cache.layers[layer],
            inputs.attention,
            self.spec.attention,
        )
        return weights.output(attended, hidden_TD)

    def route(self, layer: int, hidden_TD: Tensor) -> RoutedRows:
        """Norm and router: what goes to the experts."""
        weights, router = self._layers[layer], self.spec.router
        x_TD = self.kernels.rms_norm(hidden_TD, weights.moe_norm, self.spec.norm_eps)
        logits_TE = weights.router(x_TD)
        chosen = self.kernels.route(logits_TE, router.top_k, router.is_renormalised)
        return RoutedRows(x_TD, *chosen)

    def logits(self, hidden_TD: Tensor, rows: Tensor) -> Tensor:
        """Final norm and head of some rows -> [rows, V] in fp32."""
        chosen = hidden_TD.index_select(0, rows)
        normed = self.kernels.rms_norm(chosen, self._final_norm, self.spec.norm_eps)
        return self._head(normed).float()


def _rotary(rope: RopeSpec, dim: int, max_positions: int, device: torch.device) -> RotaryTable:
    """angle(position, i) = position / factor * theta^(-2 i / dim) (Su et al., RoFormer, 2021)."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / (rope.theta**exponents) / rope.factor
    table = rotary_table(torch.arange(max_positions).float()[:, None] * frequencies[None])
    return RotaryTable(table.cos.to(device), table.signed_sin.to(device))
