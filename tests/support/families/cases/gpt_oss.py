"""GPT-OSS: sinks, alternating windows, biases, YaRN without truncation, clamped SwiGLU."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor

from tests.support.families.case import TINY, Case

COMMON: dict[str, Any] = TINY | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 40,
    "num_local_experts": 6,
    "sliding_window": 20,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}


def _beyond_the_limit(name: str, tensor: Tensor) -> bool:
    """Scales gate and up so that some values are clamped."""
    if not name.endswith("gate_up_proj"):
        return False
    tensor.normal_(0, 1.5)
    return True


CASES = {
    "gpt_oss": Case(transformers.GptOssConfig(**COMMON), _beyond_the_limit),
    "gpt_oss-other-layers": Case(
        transformers.GptOssConfig(
            **COMMON
            | {
                "head_dim": 24,
                "num_key_value_heads": 4,
                "intermediate_size": 36,
                "num_experts_per_tok": 1,
                "sliding_window": 3,
            },
            layer_types=["full_attention", "full_attention"] + ["sliding_attention"] * 2,
            attention_bias=False,
            tie_word_embeddings=True,
            swiglu_alpha=1.2,
            swiglu_limit=0.5,
        )
    ),
}
