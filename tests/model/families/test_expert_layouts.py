"""Experts give the same logits in every layout that a family's checkpoints have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.families.cases import llama4 as cases_llama4
from tests.support.families.cases import qwen3_vl_moe as cases_qwen3_vl_moe
from tests.support.families.expert_layouts import Tensors, separate, swapped, swapped_and_separate
from tests.support.families.parity import model_logits, random_prompts, write_checkpoint

_CASES = cases_llama4.CASES | cases_qwen3_vl_moe.CASES


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("qwen3_vl_moe", swapped),  # as published: names do not tell it from what is written here
        ("qwen3_vl_moe", separate),
        ("llama4", swapped_and_separate),
        ("llama4-in-a-larger-model", swapped_and_separate),
    ],
)
def test_another_layout_gives_the_same_logits(
    case: str, layout: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    (prompt,) = random_prompts((40,))
    file = write_checkpoint(tmp_path, _CASES[case]) / "model.safetensors"
    expected = model_logits(tmp_path, "torch", prompt, len(prompt))
    tensors = load_file(file)
    assert any(".experts." in name for name in tensors), "the checkpoint has no fused experts"
    save_file(layout(tensors), file)
    found = model_logits(tmp_path, "torch", prompt, len(prompt))
    assert torch.equal(found, expected), f"{(found - expected).abs().max()=}"
