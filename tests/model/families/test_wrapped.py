"""Text models inside a vision model: the same checkpoint under a prefix, with a nested config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.families.cases.deepseek import CASES
from tests.support.families.parity import model_logits, random_prompts, write_checkpoint


@pytest.mark.parametrize(
    ("case", "architecture"),
    [
        ("deepseek_v3-groups", "KimiK25ForConditionalGeneration"),
        ("deepseek_v3-halves", "KimiVLForConditionalGeneration"),
        ("mistral4", "Mistral3ForConditionalGeneration"),
    ],
)
def test_the_text_model_inside_gives_the_same_logits(
    case: str, architecture: str, tmp_path: Path
) -> None:
    (prompt,) = random_prompts((40,))
    write_checkpoint(tmp_path, CASES[case])
    plain = model_logits(tmp_path, "torch", prompt, len(prompt))
    _wrap(tmp_path, architecture)
    wrapped = model_logits(tmp_path, "torch", prompt, len(prompt))
    assert torch.equal(plain, wrapped), f"{architecture} changed the logits of {case}"


def _wrap(folder: Path, architecture: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": [architecture], "text_config": config, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    inner = {f"language_model.{name}": tensor.clone() for name, tensor in tensors.items()}
    save_file(inner | {"vision_tower.ln_pre.weight": torch.ones(4)}, folder / "model.safetensors")
