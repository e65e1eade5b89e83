"""The same fused experts, stored the two ways round that their names do not tell apart."""

from __future__ import annotations

from pathlib import Path

import torch
from cases_qwen3_vl_moe import CASES
from parity import model_logits, random_prompts, write_checkpoint
from safetensors.torch import load_file, save_file


def test_published_and_transformers_layouts_give_the_same_logits(tmp_path: Path) -> None:
    """Published Qwen3-VL checkpoints hold [E, D, 2 F]; transformers 5 writes [E, 2 F, D]."""
    (prompt,) = random_prompts((40,))
    file = write_checkpoint(tmp_path, CASES["qwen3_vl_moe"]) / "model.safetensors"
    expected = model_logits(tmp_path, "torch", prompt, len(prompt))
    tensors = load_file(file)
    fused = [name for name in tensors if ".experts." in name]
    assert fused, "the checkpoint has no fused experts"
    swapped = {name: tensors[name].transpose(1, 2).contiguous() for name in fused}
    save_file(tensors | swapped, file)
    found = model_logits(tmp_path, "torch", prompt, len(prompt))
    assert torch.equal(found, expected), f"{(found - expected).abs().max()=}"
