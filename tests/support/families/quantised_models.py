"""Tiny models whose widths hold several blocks or groups, ragged ones too."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support.families.case import TINY, Case

_COMMON: dict[str, Any] = TINY | {"hidden_size": 256, "num_hidden_layers": 2, "head_dim": 32}
_QWEN: dict[str, Any] = {"num_experts": 4, "intermediate_size": 320}
_OSS: dict[str, Any] = TINY | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_local_experts": 4,
    "sliding_window": 8,
}
_LATENT: dict[str, Any] = TINY | {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "qk_rope_head_dim": 24,
    "kv_lora_rank": 160,
    "intermediate_size": 320,
    "moe_intermediate_size": 192,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


def qwen3_moe(expert_width: int = 128, vocab_size: int = 300) -> Case:
    widths = _QWEN | {"moe_intermediate_size": expert_width, "vocab_size": vocab_size}
    return Case(transformers.Qwen3MoeConfig(**_COMMON | widths, mlp_only_layers=[0]))


def qwen2_moe() -> Case:
    """Returns a model with biases of q, k and v, and a shared expert behind a gate."""
    widths = _QWEN | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 192}
    return Case(transformers.Qwen2MoeConfig(**_COMMON | widths))


def mixtral() -> Case:
    return Case(transformers.MixtralConfig(**_COMMON, intermediate_size=128, num_local_experts=4))


def glm4_moe() -> Case:
    """Returns a model with biases, a dense layer, a shared expert and a correction bias."""
    return Case(
        transformers.Glm4MoeConfig(
            **_COMMON,
            intermediate_size=320,
            moe_intermediate_size=96,
            n_routed_experts=4,
            attention_bias=True,
        )
    )


def deepseek_v2() -> Case:
    return Case(
        transformers.DeepseekV2Config(
            **_LATENT, q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1
        )
    )


def deepseek_v3() -> Case:
    return Case(transformers.DeepseekV3Config(**_LATENT, q_lora_rank=144, n_group=2, topk_group=1))


def mistral4() -> Case:
    return Case(
        transformers.Mistral4Config(**_LATENT, q_lora_rank=144, n_group=2, topk_group=1),
        model_class=transformers.Mistral4ForCausalLM,
    )


def llama4() -> Case:
    return Case(
        transformers.Llama4TextConfig(
            **_COMMON | {"num_experts_per_tok": 1},
            intermediate_size=128,
            intermediate_size_mlp=192,
            num_local_experts=4,
            interleave_moe_layer_step=2,
        )
    )


def gpt_oss() -> Case:
    """Returns a model with biases everywhere, the clamped activation, and interleaved gate and
    up."""
    return Case(transformers.GptOssConfig(**_OSS))


def qwen3_vl_moe(expert_width: int = 192) -> Case:
    return Case(
        transformers.Qwen3VLMoeConfig(
            text_config=_COMMON
            | _QWEN
            | {
                "moe_intermediate_size": expert_width,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5_000_000.0,
                    "mrope_interleaved": True,
                    "mrope_section": [6, 5, 5],
                },
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "intermediate_size": 16,
                "out_hidden_size": 256,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            tie_word_embeddings=False,
        )
    )
