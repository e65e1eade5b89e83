"""K-EXAONE: windows with positions and full layers without, and full layers only."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

_WIDTHS = {"intermediate_size": 72, "moe_intermediate_size": 36, "num_experts": 8}

CASES = {
    "exaone_moe": Case(
        transformers.ExaoneMoeConfig(
            **TINY | {"num_hidden_layers": 4},
            **_WIDTHS,
            head_dim=16,
            sliding_window=24,
            sliding_window_pattern=2,
            n_group=2,
            topk_group=1,
        )
    ),
    "exaone_moe-full": Case(
        transformers.ExaoneMoeConfig(
            **TINY,
            **_WIDTHS,
            head_dim=24,
            num_shared_experts=2,
            sliding_window=64,
            layer_types=["full_attention"] * 3,
            mlp_layer_types=["sparse", "dense", "sparse"],
        )
    ),
}
