"""Architectures that look like ones that are served, and are not."""

from __future__ import annotations

import pytest
from published import refusal_of

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
    assert f"architectures is '{architecture}', which is not served; served: " in said, said
