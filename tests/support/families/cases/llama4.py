"""Llama 4's text model: chunks, layers without rotation, temperature, dense layers, L2 norm."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support.families.case import TINY, Case

_COMMON: dict[str, Any] = TINY | {
    "num_hidden_layers": 5,
    "num_experts_per_tok": 1,
    "head_dim": 16,
    "intermediate_size": 40,
    "intermediate_size_mlp": 56,
    "num_local_experts": 6,
    "attention_chunk_size": 24,
    "floor_scale": 8,
    "attn_scale": 0.3,
}

CASES = {
    "llama4": Case(
        transformers.Llama4TextConfig(
            **_COMMON,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        )
    ),
    "llama4-dense-layers": Case(
        transformers.Llama4TextConfig(
            **_COMMON | {"head_dim": 24, "attention_chunk_size": 7},
            interleave_moe_layer_step=2,
            no_rope_layers=[0, 1, 1, 0, 1],
            use_qk_norm=False,
            attention_bias=True,
            attn_temperature_tuning=False,
            tie_word_embeddings=True,
        )
    ),
    "llama4-in-a-larger-model": Case(
        transformers.Llama4Config(
            text_config={**_COMMON, "model_type": "llama4_text", "num_hidden_layers": 4},
            vision_config={
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 16,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
                "image_size": 28,
            },
        )
    ),
}
