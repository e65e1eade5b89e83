"""dots.llm1: plain as published, and with groups, biases and windows in the last layers."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

_WIDTHS = {"intermediate_size": 72, "moe_intermediate_size": 36, "n_routed_experts": 8}

CASES = {
    "dots1": Case(
        transformers.Dots1Config(
            **TINY | {"num_key_value_heads": 4},
            **_WIDTHS,
            head_dim=16,
            n_shared_experts=2,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            sliding_window=None,
        )
    ),
    "dots1-windows-groups": Case(
        transformers.Dots1Config(
            **TINY | {"num_experts_per_tok": 3},
            **_WIDTHS,
            head_dim=24,
            n_shared_experts=1,
            norm_topk_prob=False,
            n_group=2,
            topk_group=1,
            sliding_window=24,
            max_window_layers=1,
            attention_bias=True,
        )
    ),
}
