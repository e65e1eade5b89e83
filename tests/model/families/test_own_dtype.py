"""A config without a dtype (GPT-OSS and MiniMax-M2 as published) gets that of the weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moe_serve.model.load.loader import ModelLoader
from tests.support.families.cases.minimax_m2 import CASES
from tests.support.families.parity import write_checkpoint


def test_a_dtype_that_is_not_stated_is_that_of_the_embedding(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CASES["minimax_m2"])
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert ModelLoader(folder).dtype == torch.float32
    path = folder / "model.safetensors"
    weights = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(weights, path)
    assert ModelLoader(folder).dtype == torch.bfloat16, "the embedding is in bfloat16"
    assert ModelLoader(folder, dtype=torch.float32).dtype == torch.float32, "asked for"
