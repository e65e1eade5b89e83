"""Flint: sinks, windows in most layers and no positions in the others, a sigmoid router."""

from __future__ import annotations

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import TensorNames, mlp_names
from moe_serve.model.families.family import Family
from moe_serve.model.families.parts import (
    decoder_basics,
    grouped_attention,
    head_dim_of,
    windowed_layers,
)
from moe_serve.model.families.qwen import qwen_sparse_layers
from moe_serve.model.spec import LayerSpec, ModelSpec, RouterSpec, SharedExpertSpec

_LAYER = "model.layers.{layer}."


def _read_spec(config: HFConfig) -> ModelSpec:
    config.require("hidden_act", "silu", default="silu")
    basics = decoder_basics(config, norm_eps=1e-6)
    rope = read_rope(config, head_dim=head_dim_of(config))
    attention = grouped_attention(
        config, rope, qk_norm="head", norm_eps=basics["norm_eps"], has_sinks=True
    )
    last = config.positive_int("num_hidden_layers") - 1
    windows = windowed_layers(config, attention, lambda i: i > 1 and i % 4 != 1 and i != last)
    has_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        **basics,
        family="flint",
        layers=tuple(
            LayerSpec(
                attention=shape,
                is_sparse=is_sparse,
                has_rotation=shape.sliding_window is not None,
            )
            for shape, is_sparse in zip(windows, qwen_sparse_layers(config), strict=True)
        ),
        expert_width=config.positive_int("moe_intermediate_size"),
        dense_width=config.positive_int("intermediate_size", default=1),
        shared=SharedExpertSpec(width=config.positive_int("shared_expert_intermediate_size")),
        has_attention_bias=has_bias,
        has_output_bias=has_bias,
        router=RouterSpec(
            shape=RouterShape(
                num_experts=config.positive_int("num_experts", "num_local_experts"),
                top_k=config.positive_int("num_experts_per_tok"),
                is_renormalised=bool(config.get("norm_topk_prob", True)),
                scoring="sigmoid",
            )
        ),
        rope=rope,
    )


FAMILY = Family(
    name="flint",
    architectures=("FlintForCausalLM",),
    read_spec=_read_spec,
    names=TensorNames(
        sinks=_LAYER + "self_attn.softmax_offset",
        shared=mlp_names(_LAYER + "mlp.shared_expert."),
    ),
)
