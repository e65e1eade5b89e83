"""MiniMax-M2: q/k norm over whole rows, `rotary_dim` rotated values, a sigmoid router."""

from __future__ import annotations

from dataclasses import replace

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.families.config_parts import (
    Family,
    decoder,
    grouped_attention,
    head_dim_of,
    plain_router,
    require_off,
)
from moe_serve.model.families.mixtral import FAMILY as MIXTRAL
from moe_serve.model.spec import LayerSpec, ModelSpec


def _read_spec(config: HFConfig) -> ModelSpec:
    _refuse_unserved(config)
    norm_eps = config.number("rms_norm_eps", 1e-6)
    head_dim = head_dim_of(config)
    share = config.positive_int("rotary_dim", default=head_dim) / head_dim
    rope = read_rope(config, head_dim=head_dim, theta=5_000_000.0, share=share)
    attention = grouped_attention(config, rope, qk_norm="row", norm_eps=norm_eps)
    return decoder(
        config,
        norm_eps=norm_eps,
        family="minimax_m2",
        layers=(LayerSpec(attention=attention),) * config.positive_int("num_hidden_layers"),
        expert_width=config.positive_int("intermediate_size"),
        has_bias=False,
        router=plain_router(
            config,
            is_renormalised=True,
            scoring="sigmoid",
            has_selection_bias=True,
            keys=("num_local_experts", "num_experts"),
        ),
        rope=rope,
    )


def _refuse_unserved(config: HFConfig) -> None:
    """Refuses keys of other MiniMax models, which published configs contain, unless they are
    inactive.
    """
    config.require("scoring_func", "sigmoid", default="sigmoid")
    config.require("use_qk_norm", True, default=True)
    config.require("qk_norm_type", "per_layer", default="per_layer")
    config.require("use_routing_bias", True, default=True)
    config.require("routed_scaling_factor", 1.0, default=1.0)
    require_off(config, "shared_intermediate_size", "sliding_window")
    if any(kind != 1 for kind in config.whole_numbers("attn_type_list")):
        raise config.error("attn_type_list", "has a layer of linear attention (not 1)")


FAMILY = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    read_spec=_read_spec,
    names=replace(
        MIXTRAL.names,
        selection_bias="model.layers.{layer}.block_sparse_moe.e_score_correction_bias",
    ),
)
