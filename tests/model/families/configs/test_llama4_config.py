"""The numbers of the published Llama 4 configs."""

from __future__ import annotations

from typing import Any

import pytest

from moe_serve.model.rope import Llama3Scaling
from moe_serve.model.spec import QueryTemperature
from tests.support.families.published import published, refusal_of, spec_of

SCOUT = published("Llama-4-Scout-17B-16E-Instruct")
MAVERICK = published("Llama-4-Maverick-17B-128E-Instruct")


def text(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return values | {"text_config": values["text_config"] | changes}


def test_scout() -> None:
    spec = spec_of(SCOUT)
    assert all(layer.is_sparse for layer in spec.layers), "no dense layers"
    rotated = [layer.has_rotation for layer in spec.layers]
    assert rotated == [True, True, True, False] * 12, rotated
    for layer in spec.layers:
        a = layer.attention
        expected = (8192, "head", True) if layer.has_rotation else (None, "none", False)
        assert (a.chunk, a.qk_norm, a.is_norm_after_rotation) == expected, layer
    assert (spec.router.num_experts, spec.router.top_k) == (16, 1), spec.router
    assert spec.router.is_weighing_inputs and spec.router.shape.scoring == "sigmoid", spec.router
    assert spec.shared is not None and spec.shared.width == 8192, spec.shared
    assert spec.query_temperature == QueryTemperature(scale=0.1, floor_scale=8192)
    assert isinstance(spec.rope.scaling, Llama3Scaling) and spec.rope.is_interleaved, spec.rope


def test_maverick() -> None:
    spec = spec_of(MAVERICK)
    assert [layer.is_sparse for layer in spec.layers] == [False, True] * 24, "every second is dense"
    assert (spec.expert_width, spec.dense_width) == (8192, 16_384), spec
    assert {layer.attention.qk_norm for layer in spec.layers} == {"none"}, "use_qk_norm is off"
    assert spec.rope.scaling is None and spec.router.num_experts == 128, spec


def test_the_text_model_alone_has_the_same_numbers() -> None:
    alone = SCOUT["text_config"] | {"architectures": ["Llama4ForCausalLM"]}
    assert spec_of(alone) == spec_of(SCOUT)


def test_lists_go_before_intervals() -> None:
    layers = spec_of(text(SCOUT, moe_layers=[0, 5], no_rope_layers=[1] * 47 + [0])).layers
    assert [i for i, layer in enumerate(layers) if layer.is_sparse] == [0, 5], "moe_layers"
    assert [i for i, layer in enumerate(layers) if not layer.has_rotation] == [47], "no_rope_layers"


def test_published_tuning_may_be_a_number() -> None:
    assert spec_of(text(SCOUT, attn_temperature_tuning=4)) == spec_of(SCOUT)
    assert spec_of(text(SCOUT, attn_temperature_tuning=False)).query_temperature is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_experts_per_tok": 2}, "only 1 is supported where weights scale inputs"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers must have one entry for each of 48 layers"),
        ({"layer_types": ["mamba"] * 48}, "supported are chunked_attention, full_attention"),
    ],
)
def test_refusals(change: dict[str, Any], complaint: str) -> None:
    said = refusal_of(text(SCOUT, **change))
    assert complaint in said, said
