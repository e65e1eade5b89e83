"""Builds a layer's Attention from its stored weights.

H heads, D width of a head, R rotated values of it, L latent width, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_kernels.interface.attention_shape import QKNormWeights, RotaryTable
from moe_kernels.interface.kernels import Kernels
from moe_kernels.interface.quantised_matrix import Weight, joined_rows, selected_rows
from moe_serve.model.rope import identity_table, make_rotary_table
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.attention import Attention, GroupedQueryAttention, LatentAttention
from moe_serve.model.stage.tensor_shard import AttentionWeights


class AttentionLoader:
    """Makes each layer's attention; the tables of positions are shared by all layers."""

    def __init__(
        self, spec: ModelSpec, kernels: Kernels, max_positions: int, device: torch.device
    ) -> None:
        self._spec, self._kernels = spec, kernels
        ropes = {spec.rope, *(spec.rope_of(layer) for layer in range(spec.num_layers))}
        self._tables = {rope: make_rotary_table(rope, max_positions, device) for rope in ropes}
        self._rotary = self._tables[spec.rope]
        self._unrotated = self._rotary
        self._query_scale = _query_scale(spec, max_positions, device)
        if not all(layer.has_rotation for layer in spec.layers):
            table = identity_table(spec.rope.dim, max_positions, device)
            self._unrotated = RotaryTable(table.cos, table.signed_sin, self._query_scale)

    def load(self, layer: int, weights: AttentionWeights) -> Attention:
        """Builds a layer's attention; none of the weights is kept."""
        return self._latent(weights) if self._spec.latent else self._grouped(layer, weights)

    def _grouped(self, layer: int, attention: AttentionWeights) -> GroupedQueryAttention:
        spec = self._spec
        weights, matrices = attention.tensors, attention.matrices
        shape, has_rotation = spec.layers[layer].attention, spec.layers[layer].has_rotation
        order = rotation_order(spec, shape.head_dim, 0)
        queries, keys = (_in_order(matrices[key], order) for key in ("q", "k"))
        bias = None
        if spec.has_attention_bias:
            q_bias, k_bias = (rows_in_order(weights[key], order) for key in ("q_bias", "k_bias"))
            bias = torch.cat([q_bias, k_bias, weights["v_bias"]])
        sinks = weights["sinks"].float().clone() if shape.has_sinks else None
        return GroupedQueryAttention(
            kernels=self._kernels,
            shape=shape,
            qkv=self._kernels.linear(joined_rows([queries, keys, matrices["v"]]), bias),
            qk_norm=self._qk_norm(layer, attention),
            sinks_H=sinks,
            rotary=self._tables[spec.rope_of(layer)] if has_rotation else self._unrotated,
        )

    def _qk_norm(self, layer: int, attention: AttentionWeights) -> QKNormWeights | None:
        """Returns the q/k norm; a norm without weights (Llama 4) gets ones."""
        shape = self._spec.layers[layer].attention
        if shape.qk_norm == "none":
            return None
        if "q_norm" not in attention.tensors:
            ones = attention.tensors["attention_norm"].new_ones(shape.head_dim)
            return QKNormWeights(ones, ones)
        return self.norm_weights(layer, attention.tensors)

    def norm_weights(self, layer: int, weights: Mapping[str, Tensor]) -> QKNormWeights:
        """Returns the norm weights of queries and keys, in the order in which the kernels
        rotate."""
        order = rotation_order(self._spec, self._spec.layers[layer].attention.head_dim, 0)
        q, k = (rows_in_order(weights[key], order).clone() for key in ("q_norm", "k_norm"))
        return QKNormWeights(q, k)

    def _latent(self, attention: AttentionWeights) -> LatentAttention:
        spec, kernels = self._spec, self._kernels
        weights, matrices = attention.tensors, attention.matrices
        a = spec.latent
        assert a is not None, "only for latent attention"
        linear, has_rank = kernels.linear, a.query_rank is not None
        query = _in_order(
            matrices["q_b" if has_rank else "q"],
            rotation_order(spec, a.nope_dim + a.rope_dim, a.nope_dim),
        )
        order = rotation_order(spec, a.latent_dim + a.rope_dim, a.latent_dim)
        latent = _in_order(matrices["kv_a"], order)
        bias = weights.get("kv_a_bias")
        up = weights["kv_b"].reshape(a.num_heads, a.nope_dim + a.value_dim, a.latent_dim)
        key_HNL, value_HVL = up.split([a.nope_dim, a.value_dim], dim=1)
        return LatentAttention(
            kernels=kernels,
            shape=a,
            absorbed=spec.attention,
            query_down=linear(matrices["q_a"], weights.get("q_a_bias")) if has_rank else None,
            query_norm=weights["q_a_norm"].clone() if has_rank else None,
            query=linear(query),
            latent=linear(latent, None if bias is None else rows_in_order(bias, order)),
            latent_norm=weights["kv_a_norm"].clone(),
            key_up=kernels.head_linear(key_HNL.transpose(1, 2)),
            value_up=kernels.head_linear(value_HVL),
            rotary=self._rotary,
            query_scale_P=self._query_scale,
        )


def rotation_order(spec: ModelSpec, head_rows: int, first: int) -> Tensor | None:
    """Returns the order in which the kernels rotate a head's rows: interleaved ones (0, 1, 2,
    3, ..) in halves (0, 2, .., 1, 3, ..). None: as they are.

    Of the `head_rows` rows those from `first` on are rotated, as many as the spec says.
    """
    if not spec.rope.is_interleaved:
        return None
    order = torch.arange(head_rows)
    rotated = order[first : first + spec.rope.dim]
    return torch.cat((order[:first], rotated[0::2], rotated[1::2], order[first + len(rotated) :]))


def _in_order(weight: Weight, order: Tensor | None) -> Weight:
    """Returns a matrix with the rows of each head in this order."""
    return weight if order is None else selected_rows(weight, _every_head(len(weight), order))


def rows_in_order(rows: Tensor, order: Tensor | None) -> Tensor:
    """Returns rows (of a bias, or of a matrix) with those of each head in this order."""
    return rows if order is None else rows[_every_head(len(rows), order)]


def _every_head(num_rows: int, order: Tensor) -> Tensor:
    heads = torch.arange(0, num_rows, len(order))
    return (heads[:, None] + order).flatten()


def _query_scale(spec: ModelSpec, num_positions: int, device: torch.device) -> Tensor | None:
    """Returns the factor of each position's query, [P] in fp32; None without factors."""
    temperature = spec.query_temperature
    if temperature is None:
        return None
    positions = torch.arange(num_positions).float() + temperature.shift
    steps = torch.floor(positions / temperature.floor_scale)
    return (torch.log1p(steps) * temperature.scale + 1.0).to(device)
