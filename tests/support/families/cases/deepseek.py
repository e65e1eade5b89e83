"""Small DeepSeek-V2, V3 and related models with odd widths; YaRN stretches 32 positions."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support.families.case import TINY, Case

_LATENT: dict[str, Any] = TINY | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 24,
    "intermediate_size": 72,
    "moe_intermediate_size": 40,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}

CASES = {
    "deepseek_v2-lite": Case(  # the query projected at once, greedy choice, one dense layer
        transformers.DeepseekV2Config(
            **_LATENT,
            q_lora_rank=None,
            n_shared_experts=2,
            first_k_dense_replace=1,
            topk_method="greedy",
            n_group=1,
            topk_group=1,
            rms_norm_eps=1e-3,  # not that of the latents
            rope_parameters=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        )
    ),
    "deepseek_v2-groups": Case(
        transformers.DeepseekV2Config(
            **_LATENT,
            q_lora_rank=28,
            n_shared_experts=1,
            first_k_dense_replace=0,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=4.0,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=_YARN | {"beta_fast": 1.0, "mscale": 1.2, "mscale_all_dim": 0.6},
        )
    ),
    "deepseek_v3-groups": Case(
        transformers.DeepseekV3Config(
            **_LATENT,
            q_lora_rank=28,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            attention_bias=True,
            rms_norm_eps=1e-3,
            rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        )
    ),
    "deepseek_v3-halves": Case(  # as Moonlight, but rotated in halves and not renormalised
        transformers.DeepseekV3Config(
            **_LATENT,
            q_lora_rank=None,
            n_shared_experts=2,
            first_k_dense_replace=0,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            rope_interleave=False,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        )
    ),
    "glm4_moe_lite": Case(
        transformers.Glm4MoeLiteConfig(
            **_LATENT,
            q_lora_rank=28,
            n_shared_experts=1,
            mlp_layer_types=["dense", "sparse", "sparse"],
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "partial_rotary_factor": 1.0,
            },
        )
    ),
    "mistral4": Case(  # queries grow at positions 32, 64 and 96
        transformers.Mistral4Config(
            **_LATENT,
            q_lora_rank=28,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            rope_parameters=_YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
        ),
        model_class=transformers.Mistral4ForCausalLM,
    ),
}
