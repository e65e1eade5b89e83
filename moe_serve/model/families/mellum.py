"""Mellum 2: Qwen3-MoE with windows in most layers, and another rotation for each kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moe_kernels.interface.attention_shape import AttentionShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import TensorNames
from moe_serve.model.families.config_parts import (
    FULL,
    SLIDING,
    Family,
    decoder,
    grouped_attention,
    head_dim_of,
    plain_router,
    sparse_layers,
    windowed_layers,
)
from moe_serve.model.families.mtp import MTPLayer, first_mtp_kind, mtp_apart
from moe_serve.model.rope import RopeSpec
from moe_serve.model.spec import LayerSpec, ModelSpec

_THETA = {FULL: 500_000.0, SLIDING: 10_000.0}


def _read_spec(config: HFConfig) -> ModelSpec:
    norm_eps = config.number("rms_norm_eps", 1e-6)
    ropes = {kind: _rope(config, kind) for kind in _THETA}
    attention = grouped_attention(config, ropes[FULL], qk_norm="head", norm_eps=norm_eps)

    def layer(shape: AttentionShape, is_sparse: bool) -> LayerSpec:
        rope = ropes[FULL if shape.sliding_window is None else SLIDING]
        return LayerSpec(attention=shape, is_sparse=is_sparse, rope=rope)

    windows = windowed_layers(config, attention, lambda layer: False)
    return decoder(
        config,
        norm_eps=norm_eps,
        family="mellum",
        layers=tuple(map(layer, windows, sparse_layers(config))),
        router=plain_router(
            config,
            is_renormalised=bool(config.get("norm_topk_prob", True)),
            keys=("num_local_experts", "num_experts"),
        ),
        rope=ropes[FULL],
    )


def _rope(config: HFConfig, kind: str) -> RopeSpec:
    """Reads `rope_parameters`, which here has one object for each kind of layer."""
    values = (config.get("rope_parameters") or {}).get(kind) or {}
    if not isinstance(values, Mapping):
        raise config.error("rope_parameters", f"must hold an object for {kind}, has {values!r}")
    rope = read_rope(config, head_dim=head_dim_of(config), theta=_THETA[kind], values=values)
    if rope.dim != head_dim_of(config):
        raise config.error(
            "rope_parameters", f"rotates a part of a head in {kind}; only whole ones are supported"
        )
    return rope


def _read_mtp(config: HFConfig, names: TensorNames, spec: ModelSpec) -> MTPLayer:
    """Reads a sparse layer with a window, unless the config says otherwise."""
    kind = first_mtp_kind(config, "mtp_layer_types", (FULL, SLIDING), SLIDING)
    mlp = first_mtp_kind(config, "mtp_mlp_layer_types", ("dense", "sparse"), "sparse")
    window = config.positive_int("sliding_window") if kind == SLIDING else None
    layer = LayerSpec(
        attention=replace(spec.attention, sliding_window=window),
        is_sparse=mlp == "sparse",
        rope=_rope(config, kind),
    )
    return mtp_apart(names, spec, layer)


FAMILY = Family(
    name="mellum",
    architectures=("MellumForCausalLM",),
    read_spec=_read_spec,
    read_mtp=_read_mtp,
)
