"""Solar Open, with YaRN as published but over 32 positions."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

CASES = {
    "solar_open": Case(
        transformers.SolarOpenConfig(
            **TINY,
            head_dim=24,
            moe_intermediate_size=36,
            n_routed_experts=8,
            attention_bias=True,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 32,
            },
        )
    )
}
