"""Hy3: q/k norm over heads, a sigmoid router with a correction bias, one shared expert."""

from __future__ import annotations

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import TensorNames, mlp_names
from moe_serve.model.families.config_parts import (
    Family,
    decoder,
    grouped_attention,
    head_dim_of,
    mixed_layers,
    sparse_layers,
)
from moe_serve.model.spec import ModelSpec, RouterSpec, SharedExpertSpec

_MLP = "model.layers.{layer}.mlp."


def _read_spec(config: HFConfig) -> ModelSpec:
    for key in ("qk_norm", "route_norm"):
        config.require(key, True, default=True)
    norm_eps = config.number("rms_norm_eps", 1e-5)
    rope = read_rope(config, head_dim=head_dim_of(config), theta=11_158_840.0)
    attention = grouped_attention(config, rope, qk_norm="head", norm_eps=norm_eps)
    expert_width = config.positive_int("moe_intermediate_size", "expert_hidden_dim")
    num_shared = config.positive_int("num_shared_experts", default=1)
    return decoder(
        config,
        norm_eps=norm_eps,
        family="hy_v3",
        layers=mixed_layers(attention, sparse_layers(config, num_dense=1)),
        expert_width=expert_width,
        dense_width=config.positive_int("intermediate_size", default=1),
        shared=SharedExpertSpec(width=num_shared * expert_width),
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        router=_router(config),
        rope=rope,
    )


def _router(config: HFConfig) -> RouterSpec:
    for key in ("moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        config.require(key, True, default=True)
    return RouterSpec(
        shape=RouterShape(
            num_experts=config.positive_int("num_experts"),
            top_k=config.positive_int("num_experts_per_tok"),
            is_renormalised=True,
            scoring="sigmoid",
            renorm_floor=1e-20,
            scaling=config.number("router_scaling_factor", 2.826),
        ),
        has_selection_bias=True,
    )


FAMILY = Family(
    name="hy_v3",
    architectures=("HYV3ForCausalLM",),
    read_spec=_read_spec,
    names=TensorNames(
        router=_MLP + "router.gate.weight",
        selection_bias=_MLP + "expert_bias",
        shared=mlp_names(_MLP + "shared_mlp."),
    ),
)
