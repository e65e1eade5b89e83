"""GLM-4.5-MoE: half of each head is rotated; a sigmoid router with groups, and shared experts.

Layers beyond `num_hidden_layers` predict further tokens; they are not read.
"""

from __future__ import annotations

from moe_serve.model.families.common import (
    decoder_basics,
    grouped_attention,
    head_dim_of,
    sparse_after,
)
from moe_serve.model.families.family import Family
from moe_serve.model.families.router import biased_sigmoid_router
from moe_serve.model.hf_config import HFConfig
from moe_serve.model.hf_rope import read_rope
from moe_serve.model.spec import LayerSpec, ModelSpec, SharedExpertSpec


def _read_spec(config: HFConfig) -> ModelSpec:
    config.require("hidden_act", "silu", default="silu")
    basics = decoder_basics(config, norm_eps=1e-5)
    rope = read_rope(config, head_dim=head_dim_of(config), share=0.5)
    attention = grouped_attention(
        config,
        rope,
        qk_norm="head" if config.get("use_qk_norm", False) else "none",
        norm_eps=basics["norm_eps"],
    )
    expert_width = config.positive_int("moe_intermediate_size")
    is_sparse_in = sparse_after(
        config.get("first_k_dense_replace", 1), config.positive_int("num_hidden_layers")
    )
    return ModelSpec(
        **basics,
        family="glm4_moe",
        layers=tuple(
            LayerSpec(attention=attention, is_sparse=is_sparse) for is_sparse in is_sparse_in
        ),
        expert_width=expert_width,
        dense_width=config.positive_int("intermediate_size", default=1),
        shared=SharedExpertSpec(
            width=expert_width * config.positive_int("n_shared_experts", default=1)
        ),
        has_attention_bias=bool(config.get("attention_bias", False)),
        router=biased_sigmoid_router(config, scaling=1.0),
        rope=rope,
    )


FAMILY = Family(name="glm4_moe", architectures=("Glm4MoeForCausalLM",), read_spec=_read_spec)
