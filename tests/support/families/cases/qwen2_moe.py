"""Qwen2-MoE: with and without biases, windows in every other layer, dense layers."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

_WIDTHS = {
    "intermediate_size": 72,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "num_experts": 6,
}

CASES = {
    "qwen2_moe": Case(transformers.Qwen2MoeConfig(**TINY, **_WIDTHS)),
    "qwen2_moe-windows-dense-layers": Case(
        transformers.Qwen2MoeConfig(
            **TINY | {"num_hidden_layers": 4, "num_key_value_heads": 4},
            **_WIDTHS | {"moe_intermediate_size": 36},
            qkv_bias=False,
            norm_topk_prob=True,
            use_sliding_window=True,
            sliding_window=24,
            max_window_layers=3,
            mlp_only_layers=[1],
            tie_word_embeddings=True,
        )
    ),
}
