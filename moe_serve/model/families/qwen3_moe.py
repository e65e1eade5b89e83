"""Qwen3-MoE: grouped-query attention with q/k norm over each head, softmax router."""

from __future__ import annotations

from moe_kernels.attention_shape import AttentionShape
from moe_serve.model.families.family import Family
from moe_serve.model.hf_config import HFConfig
from moe_serve.model.spec import ModelSpec, RouterSpec


def _read_spec(config: HFConfig) -> ModelSpec:
    config.require("hidden_act", "silu", default="silu")
    config.require("decoder_sparse_step", 1, default=1)
    config.require("mlp_only_layers", [], default=[])
    config.require("use_sliding_window", False, default=False)
    width = config.positive_int("hidden_size")
    norm_eps = config.number("rms_norm_eps", 1e-6)
    num_heads = config.positive_int("num_attention_heads")
    has_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        family="qwen3_moe",
        vocab_size=config.positive_int("vocab_size"),
        width=width,
        num_layers=config.positive_int("num_hidden_layers"),
        expert_width=config.positive_int("moe_intermediate_size"),
        attention=AttentionShape(
            num_heads=num_heads,
            num_kv_heads=config.positive_int("num_key_value_heads", default=num_heads),
            head_dim=config.positive_int("head_dim", default=width // num_heads),
            norm_eps=norm_eps,
            qk_norm="head",
        ),
        has_attention_bias=has_bias,
        has_output_bias=has_bias,
        router=RouterSpec(
            num_experts=config.positive_int("num_experts", "num_local_experts"),
            top_k=config.positive_int("num_experts_per_tok"),
            is_renormalised=bool(config.get("norm_topk_prob", False)),
        ),
        rope=config.rope(10_000.0),
        norm_eps=norm_eps,
        is_head_tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=config.positive_int("max_position_embeddings", default=32_768),
        dtype=config.dtype(),
        eos_token_ids=config.eos_token_ids(),
    )


FAMILY = Family(name="qwen3_moe", architectures=("Qwen3MoeForCausalLM",), read_spec=_read_spec)
