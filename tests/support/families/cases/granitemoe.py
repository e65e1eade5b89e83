"""Granite-MoE: every multiplier set, with and without a shared expert, Granite 4 without Mamba."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support.families.case import TINY, Case

_COMMON: dict[str, Any] = TINY | {
    "intermediate_size": 40,
    "num_local_experts": 6,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.15625,
    "logits_scaling": 6.0,
    "initializer_range": 0.4,
}

CASES = {
    "granitemoe": Case(transformers.GraniteMoeConfig(**_COMMON, tie_word_embeddings=True)),
    "granitemoe-shared": Case(
        transformers.GraniteMoeSharedConfig(
            **_COMMON,
            shared_intermediate_size=56,
            attention_bias=True,
            rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
        )
    ),
    "granitemoe-hybrid-without-mamba": Case(
        transformers.GraniteMoeHybridConfig(
            **_COMMON | {"num_hidden_layers": 2},
            shared_intermediate_size=24,
            layer_types=["full_attention"] * 2,
            mamba_n_heads=4,
        )
    ),
}
