"""ERNIE-4.5-MoE: with shared experts, and with biases and dense layers between."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

_SIZES = {k: v for k, v in TINY.items() if k != "num_experts_per_tok"}
_WIDTHS = {"intermediate_size": 72, "moe_intermediate_size": 36, "moe_num_experts": 8}

CASES = {
    "ernie4_5_moe": Case(
        transformers.Ernie4_5_MoeConfig(**_SIZES, **_WIDTHS, moe_k=2, tie_word_embeddings=True)
    ),
    "ernie4_5_moe-biases": Case(
        transformers.Ernie4_5_MoeConfig(
            **_SIZES | {"num_hidden_layers": 5},
            **_WIDTHS,
            head_dim=24,
            moe_k=3,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            moe_layer_end_index=3,
            moe_layer_interval=2,
            moe_norm_min=0.5,
            use_bias=True,
            tie_word_embeddings=False,
        )
    ),
}
