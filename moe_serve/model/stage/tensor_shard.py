"""Selects the part of an attention stage that one of several processes holds: heads, and output
columns.

No sum is ever split: every product is divided by its outputs, and the results are gathered. So each
value is computed completely by one process, and is bit-identical to the value without shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from moe_kernels.interface.adapters import Addition, ExpertAddition
from moe_kernels.interface.attention_shape import AttentionShape
from moe_kernels.interface.kernels import ExpertWeights
from moe_kernels.interface.quantised_matrix import Weight, selected_rows
from moe_serve.errors import ConfigError
from moe_serve.model.spec import ModelSpec

_PANEL = 16  # columns that the kernels compute together


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """A layer's weights by the keys of `attention_table`: matrices may be packed in few bits, and
    are those of linear layers."""

    tensors: Mapping[str, Tensor]
    matrices: Mapping[str, Weight]


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Part `index` of `count`."""

    index: int
    count: int

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """Returns the model as this shard's attention and KV cache see it: with fewer heads."""
        layers = tuple(
            replace(layer, attention=self._shape(layer.attention)) for layer in spec.layers
        )
        latent = spec.latent
        if latent is not None:
            latent = replace(latent, num_heads=latent.num_heads // self.count)
        return replace(spec, layers=layers, latent=latent)

    def _shape(self, shape: AttentionShape) -> AttentionShape:
        """Returns the shard's shape.

        With fewer key/value heads than shards, several shards hold the same head.
        """
        return replace(
            shape,
            num_heads=shape.num_heads // self.count,
            num_kv_heads=max(1, shape.num_kv_heads // self.count),
            qk_norm="none" if shape.qk_norm == "row" else shape.qk_norm,  # see RowNormedQKV
        )

    def attention(self, weights: AttentionWeights, spec: ModelSpec, layer: int) -> AttentionWeights:
        """Selects this shard's part of a layer's weights. `spec` is the whole model's."""
        return AttentionWeights(
            tensors={
                key: tensor[self.rows(key, len(tensor), spec, layer)]
                for key, tensor in weights.tensors.items()
            },
            matrices={
                key: selected_rows(matrix, self.rows(key, len(matrix), spec, layer))
                for key, matrix in weights.matrices.items()
            },
        )

    def rows(self, key: str, num_rows: int, spec: ModelSpec, layer: int) -> slice:
        """Returns this shard's heads or output columns; norms and the tensors that make latents are
        held whole.
        """
        key = key.removesuffix("_bias")
        if key == "o":
            return self.columns(num_rows)
        if key in ("q", "q_b", "kv_b", "sinks"):
            return self._run(num_rows, self.index, self.count)
        if key in ("k", "v"):
            num_kv_heads = spec.layers[layer].attention.num_kv_heads
            parts = min(self.count, num_kv_heads)
            return self._run(num_rows, self.index * parts // self.count, parts)
        return slice(None)

    @staticmethod
    def _run(num_rows: int, index: int, count: int) -> slice:
        assert num_rows % count == 0, f"{num_rows} rows in {count} parts"
        return slice(index * (num_rows // count), (index + 1) * (num_rows // count))

    def mlp(self, weights: ExpertWeights) -> ExpertWeights:
        """Selects this shard's columns of the hidden layer, and of the output."""
        gate, up, down = weights.gate, weights.up, weights.down
        hidden, output = self.columns(len(gate)), self.columns(len(down))
        gate_bias, up_bias, down_bias = (
            None if bias is None else bias[part]
            for bias, part in (
                (weights.gate_bias, hidden),
                (weights.up_bias, hidden),
                (weights.down_bias, output),
            )
        )
        return ExpertWeights(
            selected_rows(gate, hidden),
            selected_rows(up, hidden),
            selected_rows(down, output),
            gate_bias,
            up_bias,
            down_bias,
        )

    def addition(self, added: ExpertAddition) -> ExpertAddition:
        """Selects the additions to this shard's columns of an MLP."""

        def own(part: Addition | None) -> Addition | None:
            if part is None or self.count == 1:
                return part
            return Addition(part.a_RK, part.b_NR[self.columns(len(part.b_NR))])

        return ExpertAddition(gate=own(added.gate), up=own(added.up), down=own(added.down))

    def columns(self, width: int) -> slice:
        """Returns this shard's columns of an output."""
        borders = column_borders(width, self.count)
        return slice(borders[self.index], borders[self.index + 1])


def column_borders(width: int, count: int) -> list[int]:
    """Divides columns into runs that are equal except for whole panels: [0, ..., width]."""
    panel = _PANEL if width >= _PANEL * count else 1
    panels = -(-width // panel)
    return [min(width, panel * (panels * i // count)) for i in range(count + 1)]


def check_shards(spec: ModelSpec, count: int) -> None:
    """Raises ConfigError if the model's heads cannot be divided into `count` equal parts."""
    if count == 1:
        return
    a = spec.attention
    if a.num_heads % count:
        raise ConfigError(
            f"cluster.attention_tp ({count}) does not divide the model's {a.num_heads} query heads."
        )
    if spec.latent is None and a.num_kv_heads % count and count % a.num_kv_heads:
        raise ConfigError(
            f"cluster.attention_tp ({count}) must divide the model's {a.num_kv_heads} key/value "
            "heads, or be a multiple of them: each shard then holds a copy of one."
        )
