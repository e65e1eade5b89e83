"""A checkpoint with the same tokens and routing, whose experts take many times the bytes.

Experts are widened with zeros: gate and up get rows, down gets columns that add nothing. What a
step then waits for is the weights of the experts that it activates, as in a large model.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moe_serve.cache.model_identity import model_identity
from routing_predictor.traces.card import PredictorKind, read_card, write_card

_ROWS, _COLUMNS = ("gate_proj.weight", "up_proj.weight"), ("down_proj.weight",)


def write_wider(source: Path, target: Path, factor: int) -> None:
    """Copies a Qwen3-MoE checkpoint of one file; its experts become `factor` times as wide."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["moe_intermediate_size"] *= factor
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name and name.endswith(_ROWS):
            rows = (factor - 1) * tensor.shape[0]
            tensors[name] = torch.cat([tensor, tensor.new_zeros(rows, tensor.shape[1])])
        elif ".experts." in name and name.endswith(_COLUMNS):
            columns = (factor - 1) * tensor.shape[1]
            tensors[name] = torch.cat([tensor, tensor.new_zeros(tensor.shape[0], columns)], dim=1)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def write_its_predictor(source: Path, target: Path, model: Path) -> None:
    """The request predictor of the narrow model, said to be the wide one's: they route alike."""
    target.mkdir(parents=True)
    name = PredictorKind.REQUEST.value
    shutil.copy(source / f"{name}.safetensors", target / f"{name}.safetensors")
    card = read_card(source / f"{name}.json")
    write_card(replace(card, model_identity=model_identity(model).hex()), target / f"{name}.json")
