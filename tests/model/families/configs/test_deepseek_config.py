"""Published configs of models with latent attention, read into specs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moe_serve.errors import CheckpointError
from moe_serve.model.rope import YarnScaling
from moe_serve.model.spec import QueryTemperature
from tests.support.families.published import (
    GLM_FLASH,
    KIMI_K2,
    MISTRAL_SMALL_4,
    V2_CHAT,
    V2_LITE,
    V3,
    spec_of,
)


def test_deepseek_v2_lite() -> None:
    spec = spec_of(V2_LITE)
    assert [layer.is_sparse for layer in spec.layers] == [False] + [True] * 26, "dense layers"
    assert (spec.dense_width, spec.expert_width) == (10_944, 1408), "widths"
    assert spec.shared is not None and spec.shared.width == 2816, "shared experts"
    router = spec.router.shape
    assert (router.num_experts, router.top_k, router.num_groups) == (64, 6, 1), "router"
    assert (router.scoring, router.is_renormalised, router.scaling) == ("softmax", False, 1.0)
    assert spec.latent is not None and spec.latent.query_rank is None, "no query latent"
    assert isinstance(spec.rope.scaling, YarnScaling), "YaRN"
    assert spec.rope.scaling.attention_factor == 1.0, "mscale / mscale_all_dim"
    magnitude = 0.1 * 0.707 * math.log(40) + 1
    assert math.isclose(spec.latent.softmax_scale, 192**-0.5 * magnitude**2), "softmax scale"


def test_deepseek_v2_chat() -> None:
    spec = spec_of(V2_CHAT)
    router = spec.router.shape
    assert (router.num_groups, router.num_groups_kept, router.group_score) == (8, 3, "max")
    assert router.scaling == 16.0 and not spec.router.has_selection_bias, "router"
    assert spec.latent is not None and spec.latent.query_rank == 1536, "query latent"


def test_deepseek_v3() -> None:
    spec = spec_of(V3)
    assert [layer.is_sparse for layer in spec.layers] == [False] * 3 + [True] * 58, "dense layers"
    router = spec.router.shape
    assert (router.num_experts, router.top_k, router.scoring) == (256, 8, "sigmoid"), "router"
    assert (router.num_groups, router.num_groups_kept, router.group_score) == (8, 4, "top2")
    assert spec.router.has_selection_bias and router.is_renormalised, "router"
    assert (router.scaling, router.renorm_floor) == (2.5, 1e-20), "router"
    assert spec.latent is not None, "latent attention"
    assert math.isclose(spec.latent.softmax_scale, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert spec.rope.is_interleaved and spec.rope.dim == 64, "rotation"


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["K2", "K2.5"])
def test_kimi_k2(is_wrapped: bool) -> None:
    wrapped = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": KIMI_K2}
    spec = spec_of(wrapped if is_wrapped else KIMI_K2)
    router = spec.router.shape
    assert (spec.num_layers, router.num_experts, router.num_groups) == (61, 384, 1), "sizes"
    assert router.scaling == 2.827 and spec.router.has_selection_bias, "router"
    assert isinstance(spec.rope.scaling, YarnScaling), "YaRN"
    assert (spec.rope.scaling.factor, spec.rope.scaling.beta_fast) == (32.0, 1.0), "YaRN"


def test_glm_4_7_flash() -> None:
    spec = spec_of(GLM_FLASH)
    assert [layer.is_sparse for layer in spec.layers] == [False] + [True] * 46, "dense layers"
    assert spec.latent is not None and spec.latent.softmax_scale == 256**-0.5, "softmax scale"
    assert (spec.latent.value_dim, spec.latent.norm_eps, spec.norm_eps) == (256, 1e-6, 1e-5)
    assert (spec.rope.theta, spec.rope.dim, spec.rope.scaling) == (1e6, 64, None), "rotation"
    assert spec.router.shape.scaling == 1.8, "router"


def test_mistral_small_4() -> None:
    spec = spec_of(MISTRAL_SMALL_4)
    assert spec.query_temperature == QueryTemperature(scale=0.1, floor_scale=8192, shift=0)
    assert spec.rope.dim == 64, "half of a head is rotated"
    assert (spec.router.shape.scoring, spec.router.has_selection_bias) == ("softmax", False)


@pytest.mark.parametrize("config", [V2_LITE, V3, KIMI_K2], ids=["V2-Lite", "V3", "K2"])
def test_both_ways_of_stating_positions_agree(config: dict[str, Any]) -> None:
    new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {
        "rope_theta": config["rope_theta"],
        "rope_type": "yarn",
        **{k: v for k, v in config["rope_scaling"].items() if k != "type"},
    }
    assert spec_of(new) == spec_of(config), "rope_parameters against rope_theta and rope_scaling"


def test_layers_with_experts_come_at_the_stated_frequency() -> None:
    spec = spec_of(V2_LITE | {"num_hidden_layers": 6, "moe_layer_freq": 2})
    sparse = [index for index, layer in enumerate(spec.layers) if layer.is_sparse]
    assert sparse == [2, 4], "after the first, every second"


@pytest.mark.parametrize(
    ("config", "change", "complaint"),
    [
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; supported are greedy"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is True; only False"),
        (V2_LITE, {"use_mla": False}, "use_mla is False; only True"),
        (V2_LITE, {"n_routed_experts": None}, "n_routed_experts is missing"),
        (V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported are sigmoid"),
        (V3, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        (V3, {"num_key_value_heads": 8}, r"as many as num_attention_heads \(128\)"),
        (V3, {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25, which does not give"),
        (V3, {"index_topk": 2048}, "index_topk is 2048; only None"),
        (V3, {"topk_group": 9}, r"topk_group \(9\) exceeds n_group \(8\)"),
        (GLM_FLASH, {"mlp_layer_types": ["dense"]}, "mlp_layer_types must list 47 layers"),
        (GLM_FLASH, {"mlp_layer_types": ["mamba"] * 47}, "dense or sparse, not 'mamba'"),
        (GLM_FLASH, {"mlp_layer_types": [["a"], 1, *["dense"] * 45]}, r"sparse, not \['a'\]"),
        (V3, {"architectures": ["DeepseekV32ForCausalLM"]}, "it has sparse attention"),
        (V3, {"architectures": ["GlmMoeDsaForCausalLM"]}, "it has sparse attention"),
    ],
)
def test_what_is_not_served_is_refused(
    config: dict[str, Any], change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        spec_of(config | change)
