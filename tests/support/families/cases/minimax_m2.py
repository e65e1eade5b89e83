"""MiniMax-M2: `rotary_dim` as published, and everything rotated."""

from __future__ import annotations

import transformers

from tests.support.families.case import TINY, Case

_WIDTHS = {"intermediate_size": 36, "num_local_experts": 8}

CASES = {
    "minimax_m2": Case(transformers.MiniMaxM2Config(**TINY, **_WIDTHS, head_dim=24, rotary_dim=12)),
    "minimax_m2-all-rotated": Case(
        transformers.MiniMaxM2Config(
            **TINY | {"num_experts_per_tok": 5, "num_hidden_layers": 2},
            **_WIDTHS,
            head_dim=16,
            tie_word_embeddings=True,
        )
    ),
}
