"""Mellum 2: YaRN in full layers only, dense layers, windows."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

CASES = {
    "mellum": Case(
        transformers.MellumConfig(
            **TINY | {"num_hidden_layers": 4},
            intermediate_size=72,
            moe_intermediate_size=36,
            num_local_experts=8,
            head_dim=24,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention"] * 2,
            mlp_layer_types=["sparse", "sparse", "dense", "sparse"],
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500_000.0,
                    "factor": 16.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        )
    ),
}
