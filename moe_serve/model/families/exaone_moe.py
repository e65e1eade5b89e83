"""K-EXAONE: windows in most layers, no positions in the others, DeepSeek-V3's router.

Its multi-token-prediction layer is dense and stored apart (`mtp.`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import TensorNames
from moe_serve.model.families.config_parts import (
    FULL,
    SLIDING,
    Family,
    biased_sigmoid_router,
    decoder,
    grouped_attention,
    head_dim_of,
    sparse_layers,
    windowed_layers,
)
from moe_serve.model.families.mtp import MTPLayer, first_mtp_kind, mtp_apart
from moe_serve.model.spec import LayerSpec, ModelSpec, SharedExpertSpec


def _read_spec(config: HFConfig) -> ModelSpec:
    norm_eps = config.number("rms_norm_eps", 1e-5)
    rope = read_rope(config, head_dim=head_dim_of(config))
    attention = grouped_attention(config, rope, qk_norm="head", norm_eps=norm_eps)
    config.positive_int("sliding_window")  # without windows, other layers would be rotated
    expert_width = config.positive_int("moe_intermediate_size")
    num_shared = config.positive_int("num_shared_experts", default=1)
    return decoder(
        config,
        norm_eps=norm_eps,
        family="exaone_moe",
        layers=tuple(
            LayerSpec(
                attention=shape,
                is_sparse=is_sparse,
                has_rotation=shape.sliding_window is not None,
            )
            for shape, is_sparse in zip(
                windowed_layers(config, attention, _sliding_by_pattern(config)),
                sparse_layers(config, num_dense=1),
                strict=True,
            )
        ),
        expert_width=expert_width,
        dense_width=config.positive_int("intermediate_size", default=1),
        shared=SharedExpertSpec(width=num_shared * expert_width),
        has_bias=False,
        router=biased_sigmoid_router(config, scaling=2.5),
        rope=rope,
    )


def _sliding_by_pattern(config: HFConfig) -> Callable[[int], bool]:
    """Reads `sliding_window_pattern`: a number n (every n-th layer sees all), or "LLLG",
    repeated.
    """
    pattern = config.get("sliding_window_pattern", 4)
    if pattern is None:
        return lambda layer: False
    if isinstance(pattern, str) and pattern:
        return lambda layer: pattern[layer % len(pattern)] == "L"
    every = config.positive_int("sliding_window_pattern", default=4)
    return lambda layer: (layer + 1) % every != 0


def _read_mtp(config: HFConfig, names: TensorNames, spec: ModelSpec) -> MTPLayer:
    """Reads a dense layer, whose attention is that of the first layer unless the config says."""
    first = spec.layers[0]
    default = FULL if first.attention.sliding_window is None else SLIDING
    kind = first_mtp_kind(config, "mtp_layer_types", (FULL, SLIDING), default)
    window = config.positive_int("sliding_window") if kind == SLIDING else None
    layer = LayerSpec(
        attention=replace(first.attention, sliding_window=window),
        is_sparse=False,
        has_rotation=window is not None,
    )
    return mtp_apart(names, spec, layer)


FAMILY = Family(
    name="exaone_moe",
    architectures=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
    read_spec=_read_spec,
    names=TensorNames(selection_bias="model.layers.{layer}.mlp.e_score_correction_bias"),
    read_mtp=_read_mtp,
)
