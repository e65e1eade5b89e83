"""The numbers of the published Granite-MoE config, and Granite 4's hybrids."""

from __future__ import annotations

from tests.support.families.published import published, refusal_of, spec_of

GRANITE_1B = published("granite-3.1-1b-a400m-instruct")
HYBRID = GRANITE_1B | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "shared_intermediate_size": 1024,
}


def test_numbers() -> None:
    spec = spec_of(GRANITE_1B)
    assert (spec.num_layers, spec.router.num_experts, spec.router.top_k) == (24, 32, 8), spec
    assert (spec.embedding_multiplier, spec.residual_multiplier) == (12.0, 0.22), spec
    assert (spec.attention.scale, spec.logits_divisor) == (0.015625, 6.0), spec
    assert spec.shared is None and spec.is_head_tied, spec
    shared = spec_of(
        GRANITE_1B, architectures=["GraniteMoeSharedForCausalLM"], shared_intermediate_size=1024
    )
    assert shared.shared is not None and shared.shared.width == 1024, shared.shared


def test_hybrids_are_served_without_mamba_alone() -> None:
    spec = spec_of(HYBRID, layer_types=["attention"] * 24)
    assert not any(layer.has_rotation for layer in spec.layers), "no positions unless asked for"
    spec = spec_of(HYBRID, layer_types=["attention"] * 24, position_embedding_type="rope")
    assert all(layer.has_rotation for layer in spec.layers), "rope"
    mixed = refusal_of(HYBRID, layer_types=["mamba"] * 23 + ["attention"])
    assert "'mamba'; supported are attention, full_attention" in mixed, mixed
    assert "layer_types must" in refusal_of(HYBRID), "the default is Mamba"
