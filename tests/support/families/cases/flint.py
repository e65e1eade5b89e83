"""Flint: sinks, windows with positions, full layers without, dense layers first."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

CASES = {
    "flint": Case(
        transformers.FlintConfig(
            **TINY | {"num_hidden_layers": 5},
            intermediate_size=72,
            moe_intermediate_size=36,
            shared_expert_intermediate_size=56,
            num_experts=8,
            head_dim=24,
            sliding_window=24,
        )
    ),
}
