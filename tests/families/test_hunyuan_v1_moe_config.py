"""The numbers of the published Hunyuan-A13B config."""

from __future__ import annotations

import pytest
from published import refusal_of, spec_of

HUNYUAN_A13B = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "attention_bias": False,
    "attention_head_dim": 128,
    "cla_share_factor": 2,
    "eos_token_id": 127960,
    "group_limited_greedy": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_moe",
    "moe_intermediate_size": [3072] * 32,
    "moe_layer_num_skipped": 0,
    "moe_topk": [8] * 32,
    "norm_topk_prob": True,
    "norm_type": "rms",
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32,
    "position_embedding_xdrope": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "routed_scaling_factor": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "use_mla": False,
    "use_qk_norm": True,
    "vocab_size": 128167,
}


def test_numbers() -> None:
    spec = spec_of(HUNYUAN_A13B)
    assert spec.num_layers == 32 and all(layer.is_sparse for layer in spec.layers), spec.layers
    assert (spec.expert_width, spec.router.num_experts, spec.router.top_k) == (3072, 64, 8), spec
    assert spec.shared is not None and spec.shared.width == 3072, spec.shared
    assert not spec.shared.has_gate, spec.shared
    attention = spec.attention
    assert attention.qk_norm == "head" and attention.is_norm_after_rotation, attention
    assert spec.rope.theta == pytest.approx(10000.0 * 1000.0 ** (128 / 126)), spec.rope
    assert spec.rope.scaling is None, "a stretched base is all there is"
    assert spec.is_head_tied and not spec.has_attention_bias, spec


def test_one_number_for_all_layers() -> None:
    plain = spec_of(HUNYUAN_A13B, moe_topk=8, num_shared_expert=1, moe_intermediate_size=3072)
    assert plain == spec_of(HUNYUAN_A13B), "a list of equal numbers is that number"
    for key in ("moe_topk", "num_shared_expert", "moe_intermediate_size"):
        said = refusal_of(HUNYUAN_A13B, **{key: [8] * 31 + [4]})
        assert f"config.json: {key} must be the same in all layers" in said, said


def test_without_shared_expert() -> None:
    assert spec_of(HUNYUAN_A13B, use_mixed_mlp_moe=False).shared is None


@pytest.mark.parametrize("key", ["use_cla", "use_mla", "mlp_bias", "position_embedding_xdrope"])
def test_refusals(key: str) -> None:
    said = refusal_of(HUNYUAN_A13B, **{key: True})
    assert f"config.json: {key} is True" in said, said
