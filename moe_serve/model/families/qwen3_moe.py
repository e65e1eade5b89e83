"""Qwen3-MoE: grouped-query attention with q/k norm over each head, softmax router."""

from __future__ import annotations

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.families.common import decoder_basics, grouped_attention, head_dim_of
from moe_serve.model.families.family import Family
from moe_serve.model.spec import LayerSpec, ModelSpec, RouterSpec


def sparse_layers(config: HFConfig) -> tuple[bool, ...]:
    """Return which layers have experts: every `decoder_sparse_step`-th,
    except `mlp_only_layers`.
    """
    step = config.positive_int("decoder_sparse_step", default=1)
    dense = config.whole_numbers("mlp_only_layers")
    layers = range(config.positive_int("num_hidden_layers"))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def read_spec(config: HFConfig) -> ModelSpec:
    config.require("hidden_act", "silu", default="silu")
    config.require("use_sliding_window", False, default=False)
    basics = decoder_basics(config, norm_eps=1e-6)
    rope = read_rope(config, head_dim=head_dim_of(config))
    attention = grouped_attention(config, rope, qk_norm="head", norm_eps=basics["norm_eps"])
    has_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        **basics,
        family="qwen3_moe",
        layers=tuple(
            LayerSpec(attention=attention, is_sparse=is_sparse)
            for is_sparse in sparse_layers(config)
        ),
        expert_width=config.positive_int("moe_intermediate_size"),
        dense_width=config.positive_int("intermediate_size", default=1),
        has_attention_bias=has_bias,
        has_output_bias=has_bias,
        router=RouterSpec(
            shape=RouterShape(
                num_experts=config.positive_int("num_experts", "num_local_experts"),
                top_k=config.positive_int("num_experts_per_tok"),
                is_renormalised=bool(config.get("norm_topk_prob", False)),
            )
        ),
        rope=rope,
    )


FAMILY = Family(name="qwen3_moe", architectures=("Qwen3MoeForCausalLM",), read_spec=read_spec)
