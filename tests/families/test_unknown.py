"""What is said of an architecture that no family serves."""

from __future__ import annotations

import pytest
from published import refusal_of

from moe_serve.model.families import FAMILIES


@pytest.mark.parametrize(
    ("architecture", "hint"),
    [
        ("MixtralForCausalLm", "the nearest that is: MixtralForCausalLM; docs/models.md lists"),
        ("Qwen3NextForCausalLM", "the nearest that is: Qwen3MoeForCausalLM"),
        ("BertModel", "which is not served; docs/models.md lists all"),
    ],
)
def test_one_clear_sentence(architecture: str, hint: str) -> None:
    said = refusal_of({"architectures": [architecture]})
    assert said.startswith(f"config.json: architectures is {architecture!r}, which is not served")
    assert hint in said, said
    assert len(said) < 250, "a sentence, not a list"
    num_architectures = sum(len(family.architectures) for family in FAMILIES)
    assert f"all {num_architectures} that are" in said, said
