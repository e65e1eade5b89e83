"""The numbers of published Qwen1.5-MoE and Qwen2-MoE configs."""

from __future__ import annotations

from tests.support.families.published import published, refusal_of, spec_of

QWEN1_5_MOE_A2_7B = published("Qwen1.5-MoE-A2.7B")


def test_numbers() -> None:
    spec = spec_of(QWEN1_5_MOE_A2_7B)
    assert spec.num_layers == 24 and all(layer.is_sparse for layer in spec.layers), spec.layers
    assert (spec.router.num_experts, spec.router.top_k) == (60, 4), spec.router
    assert not spec.router.shape.is_renormalised, "norm_topk_prob is false"
    assert spec.expert_width == 1408, spec.expert_width
    assert spec.shared is not None and spec.shared.width == 5632, spec.shared
    assert spec.shared.has_gate, "the shared expert stands behind a gate"
    assert spec.has_attention_bias and not spec.has_output_bias, "only q, k and v have biases"
    assert spec.rope.theta == 1e6 and spec.attention.head_dim == 128, spec.rope


def test_no_window_unless_asked_for() -> None:
    assert spec_of(QWEN1_5_MOE_A2_7B).attention.sliding_window is None, "use_sliding_window is off"
    layers = spec_of(QWEN1_5_MOE_A2_7B, use_sliding_window=True).layers
    windows = [layer.attention.sliding_window for layer in layers]
    assert windows[:4] == [32768, None, 32768, None], windows
    assert windows[21:] == [None] * 3, "only the first max_window_layers"


def test_layer_types_go_before_flags() -> None:
    types = ["full_attention"] * 23 + ["sliding_attention"]
    windows = [
        layer.attention.sliding_window
        for layer in spec_of(QWEN1_5_MOE_A2_7B, layer_types=types).layers
    ]
    assert windows == [None] * 23 + [32768], windows


def test_refusals() -> None:
    assert "hidden_act is 'gelu'" in refusal_of(QWEN1_5_MOE_A2_7B, hidden_act="gelu")
    short = refusal_of(QWEN1_5_MOE_A2_7B, layer_types=["full_attention"])
    assert "layer_types must name the kind of each of 24 layers" in short, short
    other = refusal_of(QWEN1_5_MOE_A2_7B, layer_types=["linear_attention"] * 24)
    assert "layer_types has 'linear_attention'" in other, other
