"""The numbers of published GLM-4.5 configs."""

from __future__ import annotations

from tests.support.families.published import published, refusal_of, spec_of

GLM_4_5 = published("GLM-4.5")
GLM_4_5_AIR = published("GLM-4.5-Air")


def test_numbers() -> None:
    spec = spec_of(GLM_4_5)
    assert spec.num_layers == 92, "the layer for multi-token prediction is not one of them"
    assert [layer.is_sparse for layer in spec.layers[:5]] == [False] * 3 + [True] * 2, spec.layers
    assert (spec.dense_width, spec.expert_width) == (12288, 1536), spec
    assert spec.shared is not None and spec.shared.width == 1536, spec.shared
    router = spec.router.shape
    assert (router.num_experts, router.top_k, router.scaling) == (160, 8, 2.5), router
    assert router.scoring == "sigmoid" and router.is_renormalised, router
    assert spec.router.has_selection_bias, "e_score_correction_bias"
    assert (spec.attention.qk_norm, spec.attention.rotary_dim) == ("head", 64), spec.attention
    assert spec.has_attention_bias and not spec.has_output_bias, "only q, k and v have biases"
    assert spec.rope.theta == 1e6, spec.rope


def test_air() -> None:
    spec = spec_of(GLM_4_5_AIR)
    assert spec.num_layers == 46 and not spec.layers[0].is_sparse, spec.layers[0]
    assert spec.attention.qk_norm == "none", spec.attention
    assert (spec.router.num_experts, spec.router.shape.scaling) == (128, 1.0), spec.router


def test_rope_as_transformers_5_writes_it() -> None:
    new = {k: v for k, v in GLM_4_5.items() if not k.startswith(("rope", "partial"))}
    rope = {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5}
    assert spec_of(new, rope_parameters=rope).rope == spec_of(GLM_4_5).rope


def test_refusals() -> None:
    wrong = refusal_of(GLM_4_5, n_group=3)
    assert "160 experts do not make 3 equal groups" in wrong, wrong
