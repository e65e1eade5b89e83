"""The numbers of published GLM-4.5 configs."""

from __future__ import annotations

from published import refusal_of, spec_of

GLM_4_5 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "vocab_size": 151552,
}
GLM_4_5_AIR = GLM_4_5 | {
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "use_qk_norm": False,
}


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
