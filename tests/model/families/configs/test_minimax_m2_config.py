"""The numbers of the published MiniMax-M2 config."""

from __future__ import annotations

import pytest

from tests.support.families.published import published, refusal_of, spec_of

MINIMAX_M2 = published("MiniMax-M2")


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
