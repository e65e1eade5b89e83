"""GLM-4.5-MoE: as Air (biases, no q/k norm) and as the large one (q/k norm), with groups."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

_WIDTHS = {"intermediate_size": 72, "moe_intermediate_size": 36, "n_routed_experts": 8}

CASES = {
    "glm4_moe": Case(
        transformers.Glm4MoeConfig(**TINY, **_WIDTHS, head_dim=24, attention_bias=True)
    ),
    "glm4_moe-qk-norm-groups": Case(
        transformers.Glm4MoeConfig(
            **TINY | {"num_experts_per_tok": 3},
            **_WIDTHS,
            head_dim=16,
            use_qk_norm=True,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            first_k_dense_replace=2,
            routed_scaling_factor=2.5,
            partial_rotary_factor=0.25,
            rope_theta=1_000_000.0,
        )
    ),
}
