"""Hunyuan-A13B: a stretched base and one number per layer, as published; and plain with biases."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

_SIZES = {k: v for k, v in TINY.items() if k != "num_experts_per_tok"}

CASES = {
    "hunyuan_v1_moe": Case(
        transformers.HunYuanMoEV1Config(
            **_SIZES,
            intermediate_size=36,
            head_dim=16,
            num_experts=8,
            moe_topk=[3, 3, 3],
            rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
            tie_word_embeddings=True,
        )
    ),
    "hunyuan_v1_moe-biases": Case(
        transformers.HunYuanMoEV1Config(
            **_SIZES,
            intermediate_size=40,
            head_dim=24,
            num_experts=5,
            moe_topk=2,
            attention_bias=True,
        )
    ),
}
