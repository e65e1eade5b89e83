"""Counts what a step of a model multiplies and reads, from its config.json, without weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_kernels.interface.attention_shape import LatentShape
from moe_serve.errors import ConfigError
from moe_serve.model.checkpoint.hf_config import HFConfig, check_spec
from moe_serve.model.checkpoint.manifest import (
    Table,
    attention_table,
    feed_forward_table,
    model_table,
)
from moe_serve.model.families import family_of
from moe_serve.model.spec import ModelSpec
from moe_serve.simulate.layout import ModelSize

Precision = Literal["auto", "bfloat16", "fp8"]
KV_BYTES = 2  # of a value in the KV cache, and of an activation


@dataclass(frozen=True, slots=True)
class ExpandedLatents:
    """Latent attention with the keys and values of every head. `pair_flops`: as in `LayerShape`;
    `token_flops`: of computing the keys and values of a cached token."""

    pair_flops: int
    token_flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Consecutive or not: the layers that cost the same.

    `num_weights`: everything but routed experts, which every row is multiplied with; `pair_flops`:
    of one row with one cached token; `kv_values`: of one cached token; `window`: cached tokens that
    a row sees at most (None: all); `expanded`: another form of latent attention, which is counted
    in its absorbed form otherwise.
    """

    num_layers: int
    is_sparse: bool
    num_weights: int
    pair_flops: int
    kv_values: int
    window: int | None
    expanded: ExpandedLatents | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as the roofline needs it. `weight_bytes`: of one weight; with 1, rows also go to the
    experts with one byte per value."""

    size: ModelSize
    layers: tuple[LayerShape, ...]
    width: int
    expert_weights: int  # of one expert
    num_experts: int
    top_k: int
    head_weights: int
    vocab_size: int
    weight_bytes: int

    @property
    def is_fp8(self) -> bool:
        return self.weight_bytes == 1


def read_model_shape(path: Path, precision: Precision = "auto") -> ModelShape:
    """Reads a config.json, or the one in a folder. Raises CheckpointError, and ConfigError for a
    model without routed experts."""
    config = HFConfig.read(path) if path.is_dir() else HFConfig.of_file(path)
    text = config.text()
    family = family_of(config)
    spec = family.read_spec(text)
    check_spec(spec, config)
    if not spec.num_sparse_layers:
        raise ConfigError(f"{path} has no routed experts in any layer, so it has no layout.")
    names = family.names_in(lambda _: True)
    weights = [
        _numel((attention_table(names, spec, i), feed_forward_table(names, spec, i)))
        for i in range(spec.num_layers)
    ]
    if precision == "auto":
        precision = "bfloat16" if config.quantization() is None else "fp8"
    weight_bytes = 1 if precision == "fp8" else 2
    expert_weights = 3 * spec.width * spec.expert_width
    outside = _numel([model_table(names, spec)])
    name = path.resolve().name if path.is_dir() else path.stem
    size = ModelSize(
        name=name,
        attention_bytes=(outside * KV_BYTES + sum(weights) * weight_bytes),
        expert_bytes=spec.num_sparse_layers
        * spec.router.num_experts
        * expert_weights
        * weight_bytes,
        kv_token_bytes=spec.kv_bytes_per_token(KV_BYTES),
        num_kv_parts=1 if spec.latent is not None else spec.attention.num_kv_heads,
        num_experts=spec.router.num_experts,
        max_context=spec.max_positions,
    )
    return ModelShape(
        size=size,
        layers=_layers(spec, weights),
        width=spec.width,
        expert_weights=expert_weights,
        num_experts=spec.router.num_experts,
        top_k=spec.router.top_k,
        head_weights=spec.vocab_size * spec.width,
        vocab_size=spec.vocab_size,
        weight_bytes=weight_bytes,
    )


def _layers(spec: ModelSpec, weights: list[int]) -> tuple[LayerShape, ...]:
    """Joins the layers that are alike."""
    counts: dict[tuple[bool, int, int, int | None], int] = {}
    for layer, num_weights in zip(spec.layers, weights, strict=True):
        a = layer.attention
        pair_flops = 2 * a.num_heads * (a.head_dim + a.value_width)
        key = (layer.is_sparse, num_weights, pair_flops, a.sliding_window or a.chunk)
        counts[key] = counts.get(key, 0) + 1
    return tuple(
        LayerShape(
            num_layers=count,
            is_sparse=is_sparse,
            num_weights=num_weights,
            pair_flops=pair_flops,
            kv_values=spec.kv_values_per_token,
            window=window,
            expanded=None if spec.latent is None else _expanded(spec.latent),
        )
        for (is_sparse, num_weights, pair_flops, window), count in counts.items()
    )


def _expanded(latent: LatentShape) -> ExpandedLatents:
    query, value = latent.nope_dim + latent.rope_dim, latent.value_dim
    projected = latent.latent_dim * (latent.nope_dim + value)
    return ExpandedLatents(
        pair_flops=2 * latent.num_heads * (query + value),
        token_flops=2 * latent.num_heads * projected,
    )


def _numel(tables: Iterable[Table]) -> int:
    return sum(math.prod(stored.shape) for table in tables for stored in table.values())
