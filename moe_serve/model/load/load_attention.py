"""Builds a layer's Attention from its stored weights.

H heads, D width of a head, R rotated values of it, L latent width, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_kernels.interface.attention_shape import QKNormWeights, RotaryTable
from moe_kernels.interface.kernels import Kernels
from moe_serve.model.rope import identity_table, make_rotary_table
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.attention import Attention, GroupedQueryAttention, LatentAttention

Weights = Mapping[str, Tensor]


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

    def load(self, layer: int, weights: Weights) -> Attention:
        """Build a layer's attention.

        `weights` has the keys of `attention_table`; none of them is kept.
        """
        return self._latent(weights) if self._spec.latent else self._grouped(layer, weights)

    def _grouped(self, layer: int, weights: Weights) -> GroupedQueryAttention:
        spec = self._spec
        shape, has_rotation = spec.layers[layer].attention, spec.layers[layer].has_rotation

        def heads(key: str) -> Tensor:
            """Return rows of q or k, in the order in which the kernels rotate."""
            return self._reorder(weights[key], shape.head_dim, 0)

        bias = None
        if spec.has_attention_bias:
            bias = torch.cat([heads("q_bias"), heads("k_bias"), weights["v_bias"]])
        sinks = weights["sinks"].float().clone() if shape.has_sinks else None
        return GroupedQueryAttention(
            kernels=self._kernels,
            shape=shape,
            qkv=self._kernels.linear(torch.cat([heads("q"), heads("k"), weights["v"]]), bias),
            qk_norm=self._qk_norm(layer, weights),
            sinks_H=sinks,
            rotary=self._tables[spec.rope_of(layer)] if has_rotation else self._unrotated,
        )

    def _qk_norm(self, layer: int, weights: Weights) -> QKNormWeights | None:
        """Return the q/k norm; a norm without weights (Llama 4) gets ones."""
        shape = self._spec.layers[layer].attention
        if shape.qk_norm == "none":
            return None
        if "q_norm" not in weights:
            ones = weights["q"].new_ones(shape.head_dim)
            return QKNormWeights(ones, ones)
        return self.norm_weights(layer, weights)

    def norm_weights(self, layer: int, weights: Weights) -> QKNormWeights:
        """Return the norm weights of queries and keys, in the order in which the kernels rotate."""
        head_dim = self._spec.layers[layer].attention.head_dim
        q, k = (self._reorder(weights[key], head_dim, 0).clone() for key in ("q_norm", "k_norm"))
        return QKNormWeights(q, k)

    def _latent(self, weights: Weights) -> LatentAttention:
        spec, kernels = self._spec, self._kernels
        a = spec.latent
        assert a is not None, "only for latent attention"
        linear, has_rank = kernels.linear, a.query_rank is not None
        query = self._reorder(
            weights["q_b" if has_rank else "q"], a.nope_dim + a.rope_dim, a.nope_dim
        )
        compressed = a.latent_dim + a.rope_dim
        latent = self._reorder(weights["kv_a"], compressed, a.latent_dim)
        bias = weights.get("kv_a_bias")
        up = weights["kv_b"].reshape(a.num_heads, a.nope_dim + a.value_dim, a.latent_dim)
        key_HNL, value_HVL = up.split([a.nope_dim, a.value_dim], dim=1)
        return LatentAttention(
            kernels=kernels,
            shape=a,
            absorbed=spec.attention,
            query_down=linear(weights["q_a"], weights.get("q_a_bias")) if has_rank else None,
            query_norm=weights["q_a_norm"].clone() if has_rank else None,
            query=linear(query),
            latent=linear(
                latent, None if bias is None else self._reorder(bias, compressed, a.latent_dim)
            ),
            latent_norm=weights["kv_a_norm"].clone(),
            key_up=kernels.head_linear(key_HNL.transpose(1, 2)),
            value_up=kernels.head_linear(value_HVL),
            rotary=self._rotary,
            query_scale_P=self._query_scale,
        )

    def _reorder(self, rows: Tensor, head_rows: int, first: int) -> Tensor:
        """Reorder interleaved rotary rows (0, 1, 2, 3, ..) into halves (0, 2, .., 1, 3, ..).

        In each head's `head_rows` rows, those from `first` on are rotated, as many as the spec
        says.
        """
        if not self._spec.rope.is_interleaved:
            return rows
        order = torch.arange(head_rows)
        rotated = order[first : first + self._spec.rope.dim]
        order = torch.cat(
            (order[:first], rotated[0::2], rotated[1::2], order[first + len(rotated) :])
        )
        heads = rows.reshape(-1, head_rows, *rows.shape[1:])
        return heads[:, order].reshape(rows.shape)


def _query_scale(spec: ModelSpec, num_positions: int, device: torch.device) -> Tensor | None:
    """Return the factor of each position's query, [P] in fp32; None if there is none."""
    temperature = spec.query_temperature
    if temperature is None:
        return None
    positions = torch.arange(num_positions).float() + temperature.shift
    steps = torch.floor(positions / temperature.floor_scale)
    return (torch.log1p(steps) * temperature.scale + 1.0).to(device)
