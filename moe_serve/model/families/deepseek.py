"""DeepSeek's families: V2 with V2-Lite, V2.5 and Coder-V2; V3 with V3.1, R1, Kimi-K2 and Moonlight.

Kimi-K2.5, its successors and Kimi-VL contain a V3 beside a vision tower; only the text model is
served. V3's multi-token-prediction layer is stored behind the last layer.
"""

from __future__ import annotations

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.families.config_parts import (
    Family,
    biased_sigmoid_router,
    expert_groups,
    router_numbers,
    sparse_layers,
)
from moe_serve.model.families.latent import latent_decoder
from moe_serve.model.families.mtp import mtp_behind_last_layer
from moe_serve.model.spec import ModelSpec, RouterSpec


def _v2_router(config: HFConfig) -> RouterSpec:
    """Chooses top-k of all experts, or of the best groups; a group scores as its best expert."""
    config.require("scoring_func", "softmax", default="softmax")
    config.require("norm_topk_prob", False, default=False)
    method = config.one_of("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    groups = expert_groups(config) if method == "group_limited_greedy" else {}
    numbers = router_numbers(config, scaling=1.0)
    return RouterSpec(
        shape=RouterShape(**numbers, **groups, is_renormalised=False, group_score="max")
    )


def _read_v2(config: HFConfig) -> ModelSpec:
    """DeepSeek-V2: latent attention, softmax router, shared experts."""
    return latent_decoder(
        config,
        family="deepseek_v2",
        router=_v2_router(config),
        is_sparse=sparse_layers(config),
        has_mlp_bias=bool(config.get("mlp_bias", False)),
    )


DEEPSEEK_V2 = Family(
    name="deepseek_v2", architectures=("DeepseekV2ForCausalLM",), read_spec=_read_v2
)


def _read_v3(config: HFConfig) -> ModelSpec:
    """DeepSeek-V3: latent attention, sigmoid router with a bias."""
    config.require("mlp_bias", False, default=False)
    return latent_decoder(
        config,
        family="deepseek_v3",
        router=biased_sigmoid_router(config, scaling=2.5),
        is_sparse=sparse_layers(config, num_dense=3),
    )


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architectures=(
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
    ),
    read_spec=_read_v3,
    prefixes=("", "language_model."),
    read_mtp=mtp_behind_last_layer,
)
