"""DeepSeek-V2, V2-Lite, V2.5 and Coder-V2: latent attention, softmax router, shared experts."""

from __future__ import annotations

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.families.common import sparse_layers
from moe_serve.model.families.family import Family
from moe_serve.model.families.latent import latent_decoder
from moe_serve.model.families.router import expert_groups, router_numbers
from moe_serve.model.spec import ModelSpec, RouterSpec


def _router(config: HFConfig) -> RouterSpec:
    """Choose top-k of all experts, or of the best groups; a group scores as its best expert."""
    config.require("scoring_func", "softmax", default="softmax")
    config.require("norm_topk_prob", False, default=False)
    method = config.one_of("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    groups = expert_groups(config) if method == "group_limited_greedy" else {}
    numbers = router_numbers(config, scaling=1.0)
    return RouterSpec(
        shape=RouterShape(**numbers, **groups, is_renormalised=False, group_score="max")
    )


def _read_spec(config: HFConfig) -> ModelSpec:
    return latent_decoder(
        config,
        family="deepseek_v2",
        router=_router(config),
        is_sparse=sparse_layers(config),
        has_mlp_bias=bool(config.get("mlp_bias", False)),
    )


FAMILY = Family(name="deepseek_v2", architectures=("DeepseekV2ForCausalLM",), read_spec=_read_spec)
