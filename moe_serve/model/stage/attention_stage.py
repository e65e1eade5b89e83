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
from moe_kernels.interface.kernels import Kernels, LayerFront, LayerFrontParts, Linear
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.attention import Attention, GroupedQueryAttention
from moe_serve.model.stage.dense_mlp import DenseMLP
from moe_serve.model.stage.expert_choice import Router, choose_experts
from moe_serve.model.stage.step_inputs import StepInputs, make_step_inputs
from moe_serve.model.step_plan import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One layer's weights. `router` is None in a dense layer, whose MLP is then `mlp`; in a sparse
    one `mlp` is the shared expert, if there is one."""

    attention_norm: Tensor
    attention: Attention
    output: Linear
    moe_norm: Tensor
    router: Router | None
    mlp: DenseMLP | None


@dataclass(frozen=True, slots=True)
class Advance:
    """The residual stream before the routed experts, and what goes to them; None: a dense layer."""

    hidden_TD: Tensor
    routed: Routed | None


@dataclass(frozen=True, slots=True)
class Routed:
    """The normed rows, for the shared expert, and what goes to the routed ones. `foreseen_E`: what
    the rows will probably need in the next layer, uint8 of 255, where somebody knows."""

    x_TD: Tensor
    rows: RoutedRows
    foreseen_E: Tensor | None = None


class AttentionStage:
    """Embedding, attention and routing of each layer, shared experts, final norm and head."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        *,
        embedding: Tensor,
        layers: Sequence[AttentionLayer],
        final_norm: Tensor,
        head: Linear,
    ) -> None:
        self.spec, self.kernels = spec, kernels
        self._embedding, self._layers = embedding, tuple(layers)
        self._final_norm, self._head = final_norm, head
        self._fronts = tuple(self._front(layer) for layer in self._layers)
        self.layers_with_shared_expert = frozenset(
            i for i, each in enumerate(self._layers) if each.router is not None and each.mlp
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream."""
        return self._embedding.dtype

    def make_inputs(self, batch: MicroBatch, cache: KVCache, device: torch.device) -> StepInputs:
        """What the other calls want of a micro-batch."""
        return make_step_inputs(batch, cache, self.spec, self.kernels, device)

    def embed(self, inputs: StepInputs) -> Tensor:
        """-> the residual stream [T, D]."""
        hidden_TD = F.embedding(inputs.token_ids, self._embedding)
        multiplier = self.spec.embedding_multiplier
        return hidden_TD if multiplier == 1.0 else hidden_TD * multiplier

    def _front(self, layer: AttentionLayer) -> LayerFront | None:
        """The layer's attention and router as one call, if the kernels have that."""
        attention, router, spec = layer.attention, layer.router, self.spec
        if not isinstance(attention, GroupedQueryAttention):
            return None
        if spec.residual_multiplier != 1.0 or spec.router.is_weighing_inputs:
            return None
        return self.kernels.layer_front(
            LayerFrontParts(
                attention_norm=layer.attention_norm,
                qkv=attention.qkv,
                qk_norm=attention.qk_norm,
                sinks_H=attention.sinks_H,
                rotary=attention.rotary,
                shape=attention.shape,
                output=layer.output,
                moe_norm=layer.moe_norm,
                norm_eps=spec.norm_eps,
                router=None if router is None else router.linear,
                router_shape=None if router is None else spec.router.shape,
                selection_bias_E=None if router is None else router.selection_bias_E,
            )
        )

    def advance(self, layer: int, hidden_TD: Tensor, inputs: StepInputs, cache: KVCache) -> Advance:
        """A layer up to its routed experts: attention, and the router or the dense MLP."""
        front, weights = self._fronts[layer], self._layers[layer]
        if front is None:
            hidden_TD = self.attend(layer, hidden_TD, inputs, cache)
            if weights.router is None:
                return Advance(self.dense(layer, hidden_TD), None)
            return Advance(hidden_TD, self.route(layer, hidden_TD))
        done = front(
            hidden_TD,
            inputs.positions,
            inputs.kv_rows,
            cache.layers[layer],
            inputs.attention[self.spec.layers[layer].attention],
        )
        if done.expert_ids_TK is None or done.weights_TK is None:
            assert weights.mlp is not None, f"layer {layer} is neither sparse nor dense"
            return Advance(self.add(done.hidden_TD, weights.mlp(done.x_TD)), None)
        rows = RoutedRows(done.x_TD, done.expert_ids_TK, done.weights_TK)
        return Advance(done.hidden_TD, Routed(done.x_TD, rows))

    def attend(self, layer: int, hidden_TD: Tensor, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Norm, attention over the pages, residual -> [T, D]. Writes the new keys and values."""
        weights = self._layers[layer]
        x_TD = self.kernels.rms_norm(hidden_TD, weights.attention_norm, self.spec.norm_eps)
        attended = weights.attention(x_TD, inputs, cache.layers[layer])
        if self.spec.residual_multiplier == 1.0:
            return weights.output(attended, hidden_TD)
        return self.add(hidden_TD, weights.output(attended))

    def dense(self, layer: int, hidden_TD: Tensor) -> Tensor:
        """Norm, the MLP of a layer without routed experts, residual -> [T, D]."""
        weights = self._layers[layer]
        assert weights.mlp is not None, f"layer {layer} is not dense"
        x_TD = self.kernels.rms_norm(hidden_TD, weights.moe_norm, self.spec.norm_eps)
        return self.add(hidden_TD, weights.mlp(x_TD))

    def route(self, layer: int, hidden_TD: Tensor) -> Routed:
        """Norm and router: what goes to the experts."""
        weights = self._layers[layer]
        assert weights.router is not None, f"layer {layer} has no router"
        x_TD = self.kernels.rms_norm(hidden_TD, weights.moe_norm, self.spec.norm_eps)
        rows = choose_experts(self.kernels, self.spec.router, weights.router, x_TD)
        return Routed(x_TD, rows)

    def shared(self, layer: int, x_TD: Tensor) -> Tensor | None:
        """The shared expert's output [T, D] in fp32, to be added to the routed experts' sum."""
        mlp = self._layers[layer].mlp
        return None if mlp is None else mlp(x_TD)

    def add(self, hidden_TD: Tensor, out_TD: Tensor, more_TD: Tensor | None = None) -> Tensor:
        """The residual connection: a stage's output joins the stream."""
        multiplier = self.spec.residual_multiplier
        if multiplier == 1.0:
            return self.kernels.add(hidden_TD, out_TD, more_TD)
        total_TD = out_TD if more_TD is None else out_TD + more_TD
        return hidden_TD + (total_TD * multiplier).to(hidden_TD.dtype)

    def logits(self, hidden_TD: Tensor, rows: Tensor) -> Tensor:
        """Final norm and head of some rows -> [rows, V] in fp32."""
        chosen = hidden_TD.index_select(0, rows)
        normed = self.kernels.rms_norm(chosen, self._final_norm, self.spec.norm_eps)
        logits = self._head(normed).float()
        return logits if self.spec.logits_divisor == 1.0 else logits / self.spec.logits_divisor
