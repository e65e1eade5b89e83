"""The numbers of the published MiniMax-M2 config."""

from __future__ import annotations

import pytest
from published import refusal_of, spec_of

MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def test_numbers() -> None:
    spec = spec_of(MINIMAX_M2)
    assert spec.num_layers == 62 and all(layer.is_sparse for layer in spec.layers), spec.layers
    assert (spec.expert_width, spec.shared) == (1536, None), spec
    router = spec.router.shape
    assert (router.num_experts, router.top_k, router.scoring) == (256, 8, "sigmoid"), router
    assert router.is_renormalised and router.num_groups == 1, router
    assert (spec.attention.qk_norm, spec.attention.rotary_dim) == ("row", 64), spec.attention
    assert (spec.rope.theta, spec.rope.dim) == (5e6, 64), spec.rope


def test_rope_as_transformers_5_writes_it() -> None:
    new = {k: v for k, v in MINIMAX_M2.items() if k not in ("rope_theta", "rotary_dim")}
    rope = {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}
    assert spec_of(new, rope_parameters=rope).rope == spec_of(MINIMAX_M2).rope


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_type_list", [1, 0]),
        ("qk_norm_type", "per_head"),
        ("scoring_func", "softmax"),
        ("shared_intermediate_size", 512),
        ("use_routing_bias", False),
    ],
)
def test_refusals(key: str, value: object) -> None:
    assert f"config.json: {key} " in refusal_of(MINIMAX_M2, **{key: value}), key
