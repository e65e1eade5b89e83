"""GPT-OSS as published, with experts in MXFP4, against the dequantisation of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moe_kernels.kernel_choice import KernelsName
from moe_serve.model.load.loader import ModelLoader
from tests.support.families.case import Case
from tests.support.families.cases.gpt_oss import COMMON
from tests.support.families.parity import (
    check_invariance,
    check_logits,
    model_logits,
    random_prompts,
    write_checkpoint,
)
from tests.support.kernels.kernel_sets import KERNEL_SETS

_BLOCK = 32
_CASE = Case(GptOssConfig(**COMMON | {"hidden_size": 64, "intermediate_size": 96}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same weights in two folders: packed, and unpacked by transformers."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("gpt_oss")
    packed, plain = (write_checkpoint(root / name, _CASE) for name in ("packed", "plain"))
    tensors = load_file(packed / "model.safetensors")
    fused = [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]
    blocks = {name: _random_blocks(tensors.pop(name)) for name in fused}
    unpacked = {n: convert_moe_packed_tensors(*b, dtype=torch.float32) for n, b in blocks.items()}
    stored = {
        name + end: part
        for name, pair in blocks.items()
        for end, part in zip(("_blocks", "_scales"), pair, strict=True)
    }
    save_file(tensors | unpacked, plain / "model.safetensors", {"format": "pt"})
    save_file(tensors | stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


def _random_blocks(weight_EKN: Tensor) -> tuple[Tensor, Tensor]:
    """Returns random nibbles in blocks of 32 inputs, and exponents of 2^-5 to 2^-2."""
    num_experts, num_inputs, num_outputs = weight_EKN.shape
    grid = (num_experts, num_outputs, num_inputs // _BLOCK)
    nibbles = torch.randint(0, 256, (*grid, _BLOCK // 2), dtype=torch.uint8)
    return nibbles, torch.randint(122, 126, grid, dtype=torch.uint8)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_packed_is_unpacked_bit_for_bit(folders: tuple[Path, Path], kernels: KernelsName) -> None:
    packed, plain = folders
    check_logits(plain, kernels)
    (prompt,) = random_prompts((100,))
    found, expected = (model_logits(folder, kernels, prompt, 100) for folder in folders)
    assert torch.equal(found, expected), f"{(found - expected).abs().max()=}"
    check_invariance(packed, kernels)


def test_the_format_is_named(folders: tuple[Path, Path]) -> None:
    assert [ModelLoader(folder).weight_format for folder in folders] == ["mxfp4", "plain"]
