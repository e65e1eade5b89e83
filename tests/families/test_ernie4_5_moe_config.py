"""The numbers of published ERNIE-4.5 configs."""

from __future__ import annotations

import pytest
from published import refusal_of, spec_of

ERNIE_4_5_21B_A3B = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5_moe",
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "vocab_size": 103424,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
}
ERNIE_4_5_300B_A47B = ERNIE_4_5_21B_A3B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "moe_intermediate_size": 3584,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 54,
    "moe_num_shared_experts": 0,
    "moe_layer_start_index": 3,
    "moe_layer_end_index": 53,
    "moe_k": 8,
    "tie_word_embeddings": False,
}


def test_numbers() -> None:
    spec = spec_of(ERNIE_4_5_21B_A3B)
    assert [layer.is_sparse for layer in spec.layers] == [False] + [True] * 27, spec.layers
    assert (spec.dense_width, spec.expert_width) == (12288, 1536), spec
    assert spec.shared is not None and spec.shared.width == 3072, "two shared experts, as one"
    assert (spec.router.num_experts, spec.router.top_k) == (64, 6), spec.router
    assert spec.router.shape.renorm_floor == 1e-12, "moe_norm_min, if the config has none"
    assert spec.router.selection_bias_shape == (1, 64), spec.router
    assert (spec.attention.head_dim, spec.rope.dim, spec.rope.theta) == (128, 128, 5e5), spec.rope
    assert spec.rope.is_interleaved and spec.is_head_tied, spec


def test_large() -> None:
    spec = spec_of(ERNIE_4_5_300B_A47B)
    assert [layer.is_sparse for layer in spec.layers] == [False] * 3 + [True] * 51, spec.layers
    assert spec.shared is None and not spec.is_head_tied, spec
    assert spec.router.top_k == 8, spec.router


def test_end_may_be_left_open() -> None:
    for end in (-1, None):
        spec = spec_of(ERNIE_4_5_21B_A3B, moe_layer_end_index=end)
        assert spec == spec_of(ERNIE_4_5_21B_A3B), end


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_gate_act", "sigmoid"),
        ("moe_layer_start_index", [1, 2]),
        ("moe_num_experts", [64, 64]),
        ("hidden_act", "gelu"),
    ],
)
def test_refusals(key: str, value: object) -> None:
    assert f"config.json: {key} " in refusal_of(ERNIE_4_5_21B_A3B, **{key: value}), key
