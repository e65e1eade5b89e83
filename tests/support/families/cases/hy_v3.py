"""Hy3: plain as published, and with every bias that its config can ask for."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

_WIDTHS = {"intermediate_size": 72, "moe_intermediate_size": 36, "num_experts": 8}

CASES = {
    "hy_v3": Case(transformers.HYV3Config(**TINY, **_WIDTHS, head_dim=24)),
    "hy_v3-biases": Case(
        transformers.HYV3Config(
            **TINY,
            **_WIDTHS,
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
            num_shared_experts=2,
            mlp_layer_types=["sparse", "dense", "sparse"],
            enable_moe_fp32_combine=False,
        )
    ),
}
