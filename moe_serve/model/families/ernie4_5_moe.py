"""ERNIE-4.5-MoE: interleaved rotation, a softmax router with a correction bias, shared experts."""

from __future__ import annotations

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import TensorNames
from moe_serve.model.families.config_parts import (
    Family,
    decoder,
    grouped_attention,
    head_dim_of,
    mixed_layers,
)
from moe_serve.model.spec import ModelSpec, RouterSpec, SharedExpertSpec


def _read_spec(config: HFConfig) -> ModelSpec:
    if config.get("moe_gate_act"):
        config.require("moe_gate_act", "softmax", default="softmax")
    rope = read_rope(config, head_dim=head_dim_of(config), theta=500_000.0, is_interleaved=True)
    attention = grouped_attention(config, rope)
    has_bias = bool(config.get("use_bias", False))
    return decoder(
        config,
        norm_eps=1e-5,
        is_head_tied=bool(config.get("tie_word_embeddings", True)),
        family="ernie4_5_moe",
        layers=mixed_layers(attention, _sparse_layers(config)),
        shared=_shared(config),
        has_bias=has_bias,
        has_head_bias=has_bias,
        has_mlp_bias=has_bias,
        router=RouterSpec(
            shape=RouterShape(
                num_experts=config.positive_int("moe_num_experts", "num_experts"),
                top_k=config.positive_int("moe_k", "num_experts_per_tok"),
                is_renormalised=True,
                renorm_floor=config.number("moe_norm_min", 1e-12),
            ),
            has_selection_bias=True,
            has_row_of_selection_bias=True,
        ),
        rope=rope,
    )


def _sparse_layers(config: HFConfig) -> tuple[bool, ...]:
    """Returns every `moe_layer_interval`-th layer from `moe_layer_start_index` to
    `moe_layer_end_index`.
    """
    num_layers = config.positive_int("num_hidden_layers")
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    last = num_layers - 1 if last in (-1, None) else last
    for key, value in (("moe_layer_start_index", first), ("moe_layer_end_index", last)):
        if not isinstance(value, int) or value < 0:
            raise config.error(key, f"must be the index of a layer, is {value!r}")
    step = config.positive_int("moe_layer_interval", default=1)
    return tuple(first <= i <= last and (i + 1) % step == 0 for i in range(num_layers))


def _shared(config: HFConfig) -> SharedExpertSpec | None:
    num_shared = config.get("moe_num_shared_experts", 2)
    if not num_shared:
        return None
    width = config.positive_int("moe_intermediate_size")
    return SharedExpertSpec(width=width * config.positive_int("moe_num_shared_experts", default=2))


FAMILY = Family(
    name="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM"),
    read_spec=_read_spec,
    names=TensorNames(
        selection_bias="model.layers.{layer}.mlp.moe_statics.e_score_correction_bias"
    ),
)
