"""The attention stage: all parts of a model except its routed experts.

T tokens of a micro-batch, D model width, V vocabulary. It holds weights only; keys and values are
in the `KVCache` passed to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from experts.expert_stage import RoutedRows
from moe_kernels.interface.adapters import RowAdditions
from moe_kernels.interface.kernels import ExpertBank, Kernels, Linear
from moe_kernels.interface.layer_front import LayerFront, LayerFrontParts
from moe_kernels.interface.layer_stack import LayerStack, StackLayer, StackParts
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.adapter_rows import AdapterRows, ExpertRows, LayerAdditions
from moe_serve.model.stage.attention import Attention, GroupedQueryAttention
from moe_serve.model.stage.feed_forward import DenseMLP, Router, choose_experts
from moe_serve.model.stage.step_inputs import StepInputs, make_step_inputs
from moe_serve.model.step_plan import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """The weights of one layer.

    In a dense layer `router` is None and `mlp` is its MLP. In a sparse layer `mlp` is the shared
    expert, if there is one.
    """

    attention_norm: Tensor
    attention: Attention
    output: Linear
    moe_norm: Tensor
    router: Router | None
    mlp: DenseMLP | None


@dataclass(frozen=True, slots=True)
class Advance:
    """The residual stream before the routed experts, and the rows for them;
    None in a dense layer.
    """

    hidden_TD: Tensor
    routed: Routed | None


@dataclass(frozen=True, slots=True)
class Routed:
    """The normed rows for the shared expert, and the rows for the routed ones.

    `foreseen_E`: a prediction of the experts that the rows need in the next layer, uint8 in units
    of 1/255, if there is one. `adapted`: the rows whose adapter changes experts of the layer, and
    `additions`: what is added to these.
    """

    x_TD: Tensor
    rows: RoutedRows
    foreseen_E: Tensor | None = None
    adapted: tuple[ExpertRows, ...] = ()
    additions: RowAdditions | None = None


def _adapted(routed: Routed, layer: int, adapters: AdapterRows | None) -> Routed:
    """Returns routed rows with the changes of their adapters."""
    if adapters is None:
        return routed
    adapted, additions = adapters.layer(layer).experts, adapters.to_experts(layer)
    return replace(routed, adapted=adapted, additions=additions)


class AttentionStage:
    """Computes embedding, attention and routing of each layer, shared experts,
    final norm and head.
    """

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        *,
        embedding: Tensor,
        layers: Sequence[AttentionLayer],
        final_norm: Tensor,
        head: Linear,
        has_fronts: bool = True,
    ) -> None:
        """With `has_fronts`, parts of a layer run as one call if the kernels support it."""
        self.spec, self.kernels = spec, kernels
        self._embedding, self._layers = embedding, tuple(layers)
        self._final_norm, self._head = final_norm, head
        self._fronts = tuple(self._front(layer) if has_fronts else None for layer in self._layers)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the residual stream."""
        return self._embedding.dtype

    @property
    def embedding(self) -> Tensor:
        """The token embeddings [V, D]."""
        return self._embedding

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """The weights of all layers."""
        return self._layers

    @property
    def final_norm(self) -> Tensor:
        """The weights of the final norm [D]."""
        return self._final_norm

    @property
    def head(self) -> Linear:
        """The output head: normed rows -> logits. A shard's gathers the columns of all shards."""
        return self._head

    def make_inputs(self, batch: MicroBatch, cache: KVCache, device: torch.device) -> StepInputs:
        """Makes the inputs that the other methods need for a micro-batch."""
        return make_step_inputs(batch, cache, self.spec, self.kernels, device)

    def embed(self, inputs: StepInputs) -> Tensor:
        """Embeds the tokens of a micro-batch -> the residual stream [T, D]."""
        return self.embed_tokens(inputs.token_ids)

    def embed_tokens(self, token_ids_T: Tensor) -> Tensor:
        """Embeds tokens -> the residual stream [T, D]."""
        hidden_TD = F.embedding(token_ids_T, self._embedding)
        multiplier = self.spec.embedding_multiplier
        return hidden_TD if multiplier == 1.0 else hidden_TD * multiplier

    def _front(self, layer: AttentionLayer) -> LayerFront | None:
        """Returns the layer's attention and router as one call, if the kernels have one."""
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

    def stacked(self, experts: Sequence[ExpertBank | None], cache: KVCache) -> LayerStack | None:
        """Returns all layers, with embedding and head, as one call over a cache.

        `experts`: the routed experts of each layer. None: the kernels have no such call, or a part
        of the model is not in it (latent attention, multipliers, a gate of the shared expert).
        """
        spec, layers = self.spec, []
        if spec.embedding_multiplier != 1.0:
            return None
        for layer, weights in enumerate(self._layers):
            front, mlp = self._fronts[layer], weights.mlp
            if front is None or (mlp is not None and mlp.gate is not None):
                return None
            bank = None if mlp is None else mlp.bank
            shape = spec.layers[layer].attention
            layers.append(StackLayer(front, shape, cache.layers[layer], experts[layer], bank))
        return self.kernels.layer_stack(
            StackParts(
                embedding_VD=self._embedding,
                layers=layers,
                final_norm_D=self._final_norm,
                head=self._head,
                norm_eps=spec.norm_eps,
                logits_divisor=spec.logits_divisor,
                page_size=cache.page_size,
                top_k=spec.router.top_k,
            )
        )

    def front(self, layer: int) -> LayerFront | None:
        """Returns a layer up to its routed experts as one call. None: the kernels have no such
        call, or a part of the layer is not in it, or the layer has no routed experts."""
        return None if self._layers[layer].router is None else self._fronts[layer]

    def has_mlp(self, layer: int) -> bool:
        """Returns whether a layer has a shared expert, or is dense."""
        return self._layers[layer].mlp is not None

    def advance(self, layer: int, hidden_TD: Tensor, inputs: StepInputs, cache: KVCache) -> Advance:
        """Runs a layer up to its routed experts: attention, and the router or the dense MLP."""
        front, weights, adapters = self._fronts[layer], self._layers[layer], inputs.adapters
        additions = None if adapters is None else adapters.layer(layer)
        if front is None or (adapters is not None and adapters.prepared is None):
            hidden_TD = self.attend(layer, hidden_TD, inputs, cache, additions)
            if weights.router is None:
                return Advance(self.dense(layer, hidden_TD, additions), None)
            routed = self.route(layer, hidden_TD, additions)
            return Advance(hidden_TD, _adapted(routed, layer, adapters))
        done = front(
            hidden_TD,
            inputs.positions,
            inputs.kv_rows,
            cache.layers[layer],
            inputs.attention[self.spec.layers[layer].attention],
            None if adapters is None else adapters.prepared,
            layer,
        )
        if done.expert_ids_TK is None or done.weights_TK is None:
            assert weights.mlp is not None, f"layer {layer} is neither sparse nor dense"
            out_TD = weights.mlp.adapted(done.x_TD, additions)
            return Advance(self.add(done.hidden_TD, out_TD), None)
        rows = RoutedRows(done.x_TD, done.expert_ids_TK, done.weights_TK)
        return Advance(done.hidden_TD, _adapted(Routed(done.x_TD, rows), layer, adapters))

    def attend(
        self,
        layer: int,
        hidden_TD: Tensor,
        inputs: StepInputs,
        cache: KVCache,
        additions: LayerAdditions | None = None,
    ) -> Tensor:
        """Applies norm, attention over the pages and residual -> [T, D].

        Writes the new keys and values. `additions`: of the adapters, to this layer.
        """
        weights = self._layers[layer]
        eps = self.spec.norm_eps
        x_TD = self.kernels.rms_norm(hidden_TD, weights.attention_norm, eps)
        if additions is not None:
            x_TD = additions.normed("attention", hidden_TD, x_TD, eps)
        attended = weights.attention(x_TD, inputs, cache.layers[layer], additions)
        if self.spec.residual_multiplier == 1.0:
            out_TD = weights.output(attended, hidden_TD)
            return out_TD if additions is None else additions.linear("output", attended, out_TD)
        out_TD = weights.output(attended)
        if additions is not None:
            out_TD = additions.linear("output", attended, out_TD)
        return self.add(hidden_TD, out_TD)

    def moe_normed(
        self, layer: int, hidden_TD: Tensor, additions: LayerAdditions | None = None
    ) -> Tensor:
        """Applies the norm before the experts or the dense MLP -> [T, D]."""
        eps = self.spec.norm_eps
        x_TD = self.kernels.rms_norm(hidden_TD, self._layers[layer].moe_norm, eps)
        return x_TD if additions is None else additions.normed("moe", hidden_TD, x_TD, eps)

    def dense(
        self, layer: int, hidden_TD: Tensor, additions: LayerAdditions | None = None
    ) -> Tensor:
        """Applies norm, the MLP of a layer without routed experts, and residual -> [T, D]."""
        weights = self._layers[layer]
        assert weights.mlp is not None, f"layer {layer} is not dense"
        x_TD = self.moe_normed(layer, hidden_TD, additions)
        return self.add(hidden_TD, weights.mlp.adapted(x_TD, additions))

    def route(
        self, layer: int, hidden_TD: Tensor, additions: LayerAdditions | None = None
    ) -> Routed:
        """Applies norm and router -> the rows for the experts."""
        weights = self._layers[layer]
        assert weights.router is not None, f"layer {layer} has no router"
        x_TD = self.moe_normed(layer, hidden_TD, additions)
        rows = choose_experts(self.kernels, self.spec.router, weights.router, x_TD, additions)
        return Routed(x_TD, rows)

    def shared(self, layer: int, x_TD: Tensor, inputs: StepInputs | None = None) -> Tensor | None:
        """Returns the shared expert's output [T, D] in fp32,
        to be added to the routed experts' sum. `inputs`: those of the rows, which have adapters.
        """
        mlp = self._layers[layer].mlp
        if mlp is None or inputs is None or inputs.adapters is None:
            return None if mlp is None else mlp(x_TD)
        return mlp.adapted(x_TD, inputs.adapters.layer(layer))

    def add(self, hidden_TD: Tensor, out_TD: Tensor, more_TD: Tensor | None = None) -> Tensor:
        """Adds a stage's output to the residual stream."""
        multiplier = self.spec.residual_multiplier
        if multiplier == 1.0:
            return self.kernels.add(hidden_TD, out_TD, more_TD)
        total_TD = out_TD if more_TD is None else out_TD + more_TD
        return hidden_TD + (total_TD * multiplier).to(hidden_TD.dtype)

    def logits(self, hidden_TD: Tensor, rows: Tensor) -> Tensor:
        """Applies final norm and head to some rows -> [rows, V] in fp32."""
        return self.head_logits(self.normed(hidden_TD.index_select(0, rows)))

    def normed(self, hidden_TD: Tensor) -> Tensor:
        """Applies the final norm -> [T, D]."""
        return self.kernels.rms_norm(hidden_TD, self._final_norm, self.spec.norm_eps)

    def head_logits(self, normed_TD: Tensor) -> Tensor:
        """Applies the head to normed rows -> [T, V] in fp32."""
        logits = self._head(normed_TD).float()
        return logits if self.spec.logits_divisor == 1.0 else logits / self.spec.logits_divisor
