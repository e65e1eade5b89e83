"""OLMoE: q/k norm over whole rows, optional clipping, top-k weights not renormalised."""

from __future__ import annotations

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.families.family import Family
from moe_serve.model.families.parts import decoder_basics, grouped_attention, head_dim_of
from moe_serve.model.spec import LayerSpec, ModelSpec, RouterSpec


def _read_spec(config: HFConfig) -> ModelSpec:
    config.require("hidden_act", "silu", default="silu")
    basics = decoder_basics(config, norm_eps=1e-5)
    rope = read_rope(config, head_dim=head_dim_of(config))
    attention = grouped_attention(
        config,
        rope,
        qk_norm="row",
        norm_eps=basics["norm_eps"],
        clip=None if config.get("clip_qkv") is None else config.number("clip_qkv", 0.0),
    )
    has_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        **basics,
        family="olmoe",
        layers=(LayerSpec(attention=attention),) * config.positive_int("num_hidden_layers"),
        expert_width=config.positive_int("intermediate_size"),
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


FAMILY = Family(name="olmoe", architectures=("OlmoeForCausalLM",), read_spec=_read_spec)
