"""The numbers of published ERNIE-4.5 configs."""

from __future__ import annotations

import pytest

from tests.support.families.published import published, refusal_of, spec_of

ERNIE_4_5_21B_A3B = published("ERNIE-4.5-21B-A3B-PT")
ERNIE_4_5_300B_A47B = published("ERNIE-4.5-300B-A47B-PT")


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
