"""Qwen3-VL-MoE: its text model alone, stored under another root with transposed experts."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

CASES = {
    "qwen3_vl_moe": Case(
        transformers.Qwen3VLMoeConfig(
            text_config={
                **TINY,
                "head_dim": 24,
                "intermediate_size": 56,
                "moe_intermediate_size": 40,
                "num_experts": 6,
                "mlp_only_layers": [1],
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5_000_000.0,
                    "mrope_interleaved": True,
                    "mrope_section": [4, 4, 4],
                },
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "intermediate_size": 16,
                "out_hidden_size": 48,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            tie_word_embeddings=False,
        )
    )
}
