"""GLM-4.5V: its text model alone, stored under another root."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

CASES = {
    "glm4v_moe": Case(
        transformers.Glm4vMoeConfig(
            text_config={
                **TINY,
                "head_dim": 24,
                "intermediate_size": 72,
                "moe_intermediate_size": 36,
                "n_routed_experts": 8,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 2, 2],
                },
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "intermediate_size": 16,
                "out_hidden_size": 48,
            },
        )
    )
}
