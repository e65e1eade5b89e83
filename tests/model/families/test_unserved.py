"""Architectures that look like served ones are refused."""

from __future__ import annotations

import pytest

from moe_serve.model.families import FAMILIES
from tests.support.families.published import refusal_of

_NUM_SERVED = sum(len(family.architectures) for family in FAMILIES)
_UNSERVED = [
    # Layers of linear attention, state spaces or convolutions among the layers of attention.
    "BailingMoeV2_5ForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2MoeForCausalLM",
    "MiniMaxForCausalLM",
    "MiniMaxText01ForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    # Norms after the stages, gates on the attention's output, other norms or activations.
    "AXK1ForCausalLM",
    "AfmoeForCausalLM",
    "DbrxForCausalLM",
    "FlexOlmoForCausalLM",
    "Kolibri1ForCausalLM",
    "LagunaForCausalLM",
    "PhiMoEForCausalLM",
    # Layers that differ in their numbers of key/value heads.
    "MiMoV2FlashForCausalLM",
]


@pytest.mark.parametrize("architecture", _UNSERVED)
def test_is_refused_by_name(architecture: str) -> None:
    said = refusal_of({"architectures": [architecture]})
    assert said.startswith(f"config.json: architectures is '{architecture}', which is not served")
    assert f"docs/guide/models.md lists all {_NUM_SERVED} served ones" in said, said
    assert len(said) < 250, "a sentence, not a list"


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [
        ("MixtralForCausalLm", "MixtralForCausalLM"),
        ("Qwen3VLMoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"),
        ("DbrxForCausalLM", None),
        ("BertModel", None),
    ],
)
def test_the_nearest_name_is_given(architecture: str, nearest: str | None) -> None:
    said = refusal_of({"architectures": [architecture]})
    hint = (
        "; docs/guide/models.md"
        if nearest is None
        else f"; the nearest served one: {nearest}; docs/"
    )
    assert f"which is not served{hint}" in said, said
