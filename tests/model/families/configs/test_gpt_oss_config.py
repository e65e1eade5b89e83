"""The numbers of the published gpt-oss configs."""

from __future__ import annotations

import pytest

from moe_serve.model.rope import YarnScaling
from tests.support.families.published import published, refusal_of, spec_of

GPT_OSS_20B = published("gpt-oss-20b")


def test_numbers() -> None:
    spec = spec_of(GPT_OSS_20B)
    windows = [layer.attention.sliding_window for layer in spec.layers]
    assert windows == [128, None] * 12, windows
    assert all(layer.attention.has_sinks for layer in spec.layers), "sinks in every layer"
    assert (spec.attention.num_heads, spec.attention.group) == (64, 8), spec.attention
    assert (spec.router.num_experts, spec.router.top_k) == (32, 4), spec.router
    assert spec.router.has_bias and spec.router.shape.is_renormalised, spec.router
    activation = spec.activation
    assert (activation.alpha, activation.limit, activation.up_offset) == (1.702, 7.0, 1.0)
    assert spec.has_expert_bias and spec.has_attention_bias and spec.has_output_bias, spec
    yarn = spec.rope.scaling
    assert isinstance(yarn, YarnScaling) and not yarn.is_truncated, yarn
    assert yarn.attention_factor == pytest.approx(1.34657359), "0.1 ln(32) + 1"


def test_layers_alternate_where_they_are_not_listed() -> None:
    assert spec_of(GPT_OSS_20B, layer_types=None) == spec_of(GPT_OSS_20B)


def test_rope_as_transformers_5_writes_it() -> None:
    new = {k: v for k, v in GPT_OSS_20B.items() if not k.startswith("rope")}
    rope = GPT_OSS_20B["rope_scaling"] | {"rope_theta": GPT_OSS_20B["rope_theta"]}
    assert spec_of(new, rope_parameters=rope) == spec_of(GPT_OSS_20B)


def test_refusals() -> None:
    assert "hidden_act is 'gelu'" in refusal_of(GPT_OSS_20B, hidden_act="gelu")
    short = refusal_of(GPT_OSS_20B, layer_types=["full_attention"])
    assert "layer_types" in short and "24 layers" in short, short
    other = refusal_of(GPT_OSS_20B, layer_types=["linear_attention"] * 24)
    assert "'linear_attention'; supported are full_attention, sliding_attention" in other, other
