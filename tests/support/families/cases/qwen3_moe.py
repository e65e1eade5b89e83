"""Qwen3-MoE with dense layers among the sparse ones (plain: tests/engine/test_parity.py)."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

CASES = {
    "qwen3_moe-dense-layers": Case(
        transformers.Qwen3MoeConfig(
            **TINY | {"num_hidden_layers": 4},
            head_dim=16,
            intermediate_size=72,
            moe_intermediate_size=40,
            num_experts=8,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
        )
    )
}
