"""Builds the attention stage of a BitDelta adapter: it shares the base model's matrices, adds signs
to them, and has its own norms, routers, embeddings and head, as far as these are stored.

N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_kernels.interface.attention_shape import QKNormWeights
from moe_kernels.interface.kernels import Linear
from moe_kernels.interface.sign_matrix import SignMatrix
from moe_kernels.interface.signed_kernels import SignedKernels
from moe_serve.adapters.adapter_part import LiveModel
from moe_serve.adapters.bitdelta.signed_experts import SignedExperts, no_signs, with_bias
from moe_serve.adapters.bitdelta.tensors import BitDeltaTensors
from moe_serve.adapters.low_rank import linear_parts, row_order
from moe_serve.adapters.targets import AdaptedMatrix
from moe_serve.model.checkpoint.manifest import (
    Stored,
    Table,
    attention_table,
    feed_forward_table,
    model_table,
)
from moe_serve.model.load.load_attention import rotation_order, rows_in_order
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.attention import Attention, GroupedQueryAttention, LatentAttention
from moe_serve.model.stage.attention_stage import AttentionLayer, AttentionStage
from moe_serve.model.stage.feed_forward import DenseMLP, Router
from moe_serve.model.stage.gather import GatheredAttention
from moe_serve.model.stage.tensor_shard import TensorShard


class SignedStages:
    """Makes the stages of adapters. `live.attention` is the base model's stage."""

    def __init__(
        self, loader: ModelLoader, kernels: SignedKernels, live: LiveModel, experts: SignedExperts
    ) -> None:
        assert live.attention is not None, "this process has no attention"
        self._loader, self._kernels, self._experts = loader, kernels, experts
        self.base, self._gather = live.attention, live.gather
        self._shard = TensorShard(0, 1) if live.gather is None else live.gather.shard

    def stage(self, tensors: BitDeltaTensors) -> tuple[AttentionStage, int]:
        """Returns the stage of an adapter, and the bytes that it adds."""
        return _StageBuild(self, tensors).made()


class _StageBuild:
    """Builds the stage of one adapter."""

    def __init__(self, owner: SignedStages, tensors: BitDeltaTensors) -> None:
        self._loader, self._kernels = owner._loader, owner._kernels
        self._base, self._gather, self._shard = owner.base, owner._gather, owner._shard
        self._experts, self._tensors = owner._experts, tensors
        self._num_bytes = 0

    def made(self) -> tuple[AttentionStage, int]:
        loader, base = self._loader, self._base
        table = model_table(loader.names, loader.spec)
        embedding = self._own(table["embedding"])
        stage = AttentionStage(
            base.spec,
            base.kernels,
            embedding=base.embedding if embedding is None else embedding,
            layers=[self._layer(i, layer) for i, layer in enumerate(base.layers)],
            final_norm=self._own_or(table["final_norm"], base.final_norm),
            head=self._head(table, embedding),
            has_fronts=False,
        )
        return stage, self._num_bytes

    def _own(self, stored: Stored, dtype: torch.dtype | None = None) -> Tensor | None:
        """Reads a tensor that the adapter has in full."""
        own = self._tensors.tensor(stored, dtype or self._loader.dtype)
        if own is None:
            return None
        self._num_bytes += own.nbytes
        return own.to(self._loader.device)

    def _own_or(self, stored: Stored, base: Tensor) -> Tensor:
        own = self._own(stored)
        return base if own is None else own

    def _head(self, table: Table, embedding: Tensor | None) -> Linear:
        loader, spec = self._loader, self._loader.spec
        weight = embedding if spec.is_head_tied else self._own(table["head"])
        bias = self._own(table["head_bias"]) if spec.has_head_bias else None
        if weight is None and bias is None:
            return self._base.head
        if spec.has_head_bias and bias is None:
            bias = loader.tensor(table["head_bias"])
        if weight is None:
            weight = loader.output_matrix()
        if spec.is_head_tied:
            self._num_bytes += weight.nbytes  # packed beside the embedding
        return loader.head(weight, bias, self._gather)

    def _layer(self, layer: int, base: AttentionLayer) -> AttentionLayer:
        loader = self._loader
        table = attention_table(loader.names, loader.spec, layer)
        feed = feed_forward_table(loader.names, loader.spec, layer)
        heads = base.attention
        part = heads.part if isinstance(heads, GatheredAttention) else heads
        own: Attention = self._attention(layer, part, table)
        if isinstance(heads, GatheredAttention):
            own = replace(heads, part=own)
        return AttentionLayer(
            attention_norm=self._own_or(table["attention_norm"], base.attention_norm),
            attention=own,
            output=self._signed("output", layer, base.output, table),
            moe_norm=self._own_or(feed["moe_norm"], base.moe_norm),
            router=None if base.router is None else self._router(layer, base.router, feed),
            mlp=None if base.mlp is None else self._mlp(layer, base.mlp, feed),
        )

    def _attention(self, layer: int, base: Attention, table: Table) -> Attention:
        if isinstance(base, GroupedQueryAttention):
            return replace(
                base,
                qkv=self._signed("qkv", layer, base.qkv, table),
                qk_norm=self._qk_norm(layer, base.qk_norm, table),
                sinks_H=self._sinks(layer, base.sinks_H, table),
            )
        assert isinstance(base, LatentAttention), f"{type(base).__name__} has no signs"
        made = replace(
            base,
            query=self._signed("query", layer, base.query, table),
            latent=self._signed("latent", layer, base.latent, table),
            latent_norm=self._own_or(table["kv_a_norm"], base.latent_norm),
        )
        if base.query_down is not None and base.query_norm is not None:
            made = replace(
                made,
                query_down=self._signed("query_down", layer, base.query_down, table),
                query_norm=self._own_or(table["q_a_norm"], base.query_norm),
            )
        up = self._own(table["kv_b"])
        if up is None:
            return made
        a, kernels = base.shape, self._loader.kernels
        rows = up[self._shard.rows("kv_b", len(up), self._loader.spec, layer)]
        up_HNL = rows.reshape(a.num_heads, a.nope_dim + a.value_dim, a.latent_dim)
        key_HNL, value_HVL = up_HNL.split([a.nope_dim, a.value_dim], dim=1)
        return replace(
            made,
            key_up=kernels.head_linear(key_HNL.transpose(1, 2)),
            value_up=kernels.head_linear(value_HVL),
        )

    def _signed(self, key: str, layer: int, base: Linear, table: Table) -> Linear:
        """Returns a linear layer with the signs of the matrices behind it."""
        parts = [part for part in linear_parts(self._loader.spec)[key] if part in table]
        stored = {part: self._matrix(layer, part, table) for part in parts}
        if all(matrix is None for matrix in stored.values()):
            return base
        joined = _joined(
            [
                self._held(layer, part, matrix or no_signs(table[part].shape))
                for part, matrix in stored.items()
            ]
        )
        self._num_bytes += joined.nbytes
        return self._kernels.signed_linear(base, joined.to(self._loader.device))

    def _matrix(self, layer: int, part: str, table: Table) -> SignMatrix | None:
        """Reads the signs of a matrix, and the change to its bias."""
        shape, bias = table[part].shape, None
        target = AdaptedMatrix(layer=layer, kind="attention", part=part, shape=shape)
        stored = table.get(f"{part}_bias")
        if stored is not None:
            own = self._tensors.tensor(stored, torch.float32)
            bias = None if own is None else own - self._loader.tensor(stored).float()
        return with_bias(self._tensors.matrix(target), bias, shape)

    def _held(self, layer: int, part: str, matrix: SignMatrix) -> SignMatrix:
        """Returns this shard's rows, in the order in which the kernels rotate. The output is whole,
        as every shard has all its columns."""
        spec = self._loader.spec
        order = row_order(spec, layer, part)
        if order is not None:
            places = torch.arange(matrix.num_rows)
            matrix = matrix.rows(rows_in_order(places, order))
        if part == "o":
            return matrix
        return matrix.rows(self._shard.rows(part, matrix.num_rows, spec, layer))

    def _qk_norm(
        self, layer: int, base: QKNormWeights | None, table: Table
    ) -> QKNormWeights | None:
        if base is None or "q_norm" not in table:
            return base
        order = rotation_order(
            self._loader.spec, self._loader.spec.layers[layer].attention.head_dim, 0
        )
        own = [self._own(table[key]) for key in ("q_norm", "k_norm")]
        q, k = (None if each is None else rows_in_order(each, order).clone() for each in own)
        return QKNormWeights(base.q if q is None else q, base.k if k is None else k)

    def _sinks(self, layer: int, base: Tensor | None, table: Table) -> Tensor | None:
        own = self._own(table["sinks"], torch.float32) if "sinks" in table else None
        if own is None:
            return base
        return own[self._shard.rows("sinks", len(own), self._loader.spec, layer)].clone()

    def _router(self, layer: int, base: Router, feed: Table) -> Router:
        keys = [key for key in ("router", "router_bias", "selection_bias") if key in feed]
        own = {key: self._own(feed[key], torch.float32) for key in keys}
        if all(each is None for each in own.values()):
            return base
        weights = self._loader.router_weights(layer)
        made = {key: weights[key] if each is None else each for key, each in own.items()}
        selection = made.get("selection_bias")
        return Router(
            linear=self._loader.kernels.router_linear(made["router"], made.get("router_bias")),
            selection_bias_E=None if selection is None else selection.flatten(),
        )

    def _mlp(self, layer: int, base: DenseMLP, feed: Table) -> DenseMLP:
        bank, num_bytes = self._experts.mlp(layer, base.bank, self._tensors)
        self._num_bytes += num_bytes
        own = self._own(feed["shared_gate"], torch.float32) if "shared_gate" in feed else None
        gate = base.gate if own is None else self._loader.kernels.router_linear(own)
        return DenseMLP(bank=bank, gate=gate)


def _joined(parts: Sequence[SignMatrix]) -> SignMatrix:
    """Returns the rows of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    biases = None
    if any(part.bias_N is not None for part in parts):
        biases = [
            torch.zeros(part.num_rows) if part.bias_N is None else part.bias_N for part in parts
        ]
    return SignMatrix(
        bits_NB=torch.cat([part.bits_NB for part in parts]),
        num_columns=parts[0].num_columns,
        scales_N=torch.cat([part.every_scale() for part in parts]),
        bias_N=None if biases is None else torch.cat(biases),
    )
