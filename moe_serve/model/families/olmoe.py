"""OLMoE: q/k norm over whole rows, optional clipping, top-k weights not renormalised."""

from __future__ import annotations

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.families.config_parts import (
    Family,
    decoder,
    grouped_attention,
    head_dim_of,
    plain_router,
)
from moe_serve.model.spec import LayerSpec, ModelSpec


def _read_spec(config: HFConfig) -> ModelSpec:
    norm_eps = config.number("rms_norm_eps", 1e-5)
    rope = read_rope(config, head_dim=head_dim_of(config))
    attention = grouped_attention(
        config,
        rope,
        qk_norm="row",
        norm_eps=norm_eps,
        clip=None if config.get("clip_qkv") is None else config.number("clip_qkv", 0.0),
    )
    return decoder(
        config,
        norm_eps=norm_eps,
        family="olmoe",
        layers=(LayerSpec(attention=attention),) * config.positive_int("num_hidden_layers"),
        expert_width=config.positive_int("intermediate_size"),
        router=plain_router(config, is_renormalised=bool(config.get("norm_topk_prob", False))),
        rope=rope,
    )


FAMILY = Family(name="olmoe", architectures=("OlmoeForCausalLM",), read_spec=_read_spec)
