"""The numbers of published configs of families that differ little from others."""

from __future__ import annotations

from moe_serve.model.rope import YarnScaling
from tests.support.families.published import refusal_of, spec_of

SOLAR_OPEN_100B = {
    "architectures": ["SolarOpenForCausalLM"],
    "model_type": "solar_open",
    "partial_rotary_factor": 1.0,
    "hidden_size": 4096,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 196608,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1280,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "max_position_embeddings": 131072,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 0,
    "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
}
DOTS_LLM1 = {
    "architectures": ["Dots1ForCausalLM"],
    "model_type": "dots1",
    "hidden_size": 4096,
    "num_hidden_layers": 62,
    "intermediate_size": 10944,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "vocab_size": 152064,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_group": None,
    "topk_group": None,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 32768,
    "max_window_layers": 62,
    "rope_theta": 10000000,
    "scoring_func": "sigmoid",
    "sliding_window": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
K_EXAONE_236B = {
    "architectures": ["ExaoneMoEForCausalLM"],
    "model_type": "exaone_moe",
    "vocab_size": 153600,
    "hidden_size": 6144,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 262144,
    "sliding_window": 128,
    "sliding_window_pattern": "LLLG",
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "tie_word_embeddings": False,
}
HY3 = {
    "architectures": ["HYV3ForCausalLM"],
    "dtype": "bfloat16",
    "enable_lm_head_fp32": True,
    "eos_token_id": 120025,
    "expert_hidden_dim": 1536,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "max_position_embeddings": 262144,
    "model_type": "hy_v3",
    "moe_router_enable_expert_bias": True,
    "moe_router_use_sigmoid": True,
    "num_attention_heads": 64,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "qk_norm": True,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
    "route_norm": True,
    "router_scaling_factor": 2.826,
    "tie_word_embeddings": False,
    "vocab_size": 120832,
}
MELLUM2 = {
    "architectures": ["MellumForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 28,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 7168,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 7,
    "mlp_layer_types": ["sparse"] * 28,
    "max_position_embeddings": 131072,
    "model_type": "mellum",
    "moe_intermediate_size": 896,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 500000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.2772588722239782,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "vocab_size": 98304,
}


def test_solar_open() -> None:
    spec = spec_of(SOLAR_OPEN_100B)
    assert spec.num_layers == 48 and all(layer.is_sparse for layer in spec.layers), spec.layers
    assert spec.attention.rotary_dim is None and spec.attention.qk_norm == "none", spec.attention
    assert isinstance(spec.rope.scaling, YarnScaling) and spec.rope.scaling.factor == 2.0, spec.rope
    assert "first_k_dense_replace is 1" in refusal_of(SOLAR_OPEN_100B, first_k_dense_replace=1)


def test_dots1() -> None:
    spec = spec_of(DOTS_LLM1)
    assert [layer.is_sparse for layer in spec.layers] == [False] + [True] * 61, spec.layers
    assert spec.shared is not None and spec.shared.width == 2816, spec.shared
    router = spec.router.shape
    assert (router.num_experts, router.top_k, router.scaling) == (128, 6, 2.5), router
    assert (spec.attention.qk_norm, spec.attention.sliding_window) == ("head", None), spec.attention
    assert spec.rope.theta == 1e7, spec.rope


def test_exaone_moe() -> None:
    spec = spec_of(K_EXAONE_236B)
    windows = [layer.attention.sliding_window for layer in spec.layers]
    assert windows == [128, 128, 128, None] * 12, windows
    assert [layer.has_rotation for layer in spec.layers] == [True, True, True, False] * 12
    assert [layer.is_sparse for layer in spec.layers] == [False] + [True] * 47, spec.layers
    assert spec.shared is not None and spec.shared.width == 2048, spec.shared
    listed = (["sliding_attention"] * 3 + ["full_attention"]) * 12
    for changes in ({"layer_types": listed}, {"sliding_window_pattern": 4}):
        assert spec_of(K_EXAONE_236B, **changes) == spec, changes


def test_hy_v3() -> None:
    spec = spec_of(HY3)
    assert [layer.is_sparse for layer in spec.layers] == [False] + [True] * 79, spec.layers
    router = spec.router.shape
    assert (router.num_experts, router.top_k, router.scaling) == (192, 8, 2.826), router
    assert router.scoring == "sigmoid" and spec.router.has_selection_bias, spec.router
    assert (spec.dense_width, spec.expert_width) == (13312, 1536), spec
    for key in ("qk_norm", "route_norm", "moe_router_use_sigmoid"):
        assert f"{key} is False" in refusal_of(HY3, **{key: False}), key


def test_mellum() -> None:
    spec = spec_of(MELLUM2)
    full, sliding = spec.rope_of(3), spec.rope_of(0)
    assert isinstance(full.scaling, YarnScaling), full
    assert full.scaling.attention_factor == 1.2772588722239782, full
    assert sliding.scaling is None and sliding.theta == 5e5, sliding
    windows = [layer.attention.sliding_window for layer in spec.layers]
    assert windows == [1024, 1024, 1024, None] * 7, windows


def test_glm4v_moe_is_its_text_model() -> None:
    text = {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 65536,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
        "rope_theta": 10000.0,
        "vocab_size": 151552,
    }
    spec = spec_of({"architectures": ["Glm4vMoeForConditionalGeneration"], "text_config": text})
    assert (spec.num_layers, spec.rope.dim) == (46, 64), spec
    assert spec.has_attention_bias and spec.rope.scaling is None, spec
