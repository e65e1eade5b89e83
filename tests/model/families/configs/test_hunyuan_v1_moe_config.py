"""The numbers of the published Hunyuan-A13B config."""

from __future__ import annotations

import pytest

from tests.support.families.published import published, refusal_of, spec_of

HUNYUAN_A13B = published("Hunyuan-A13B-Instruct")


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
