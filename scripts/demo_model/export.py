"""Exports a training checkpoint as a folder that moe-serve and other engines can load."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .hf_format import (
    CHAT_TEMPLATE,
    from_hf,
    generation_config,
    model_config,
    to_hf,
    tokenizer_config,
)
from .model_card import model_card
from .network import Network, Shape
from .training import Recipe

MAX_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """A training checkpoint without its optimizer state."""

    weights: dict[str, Tensor]  # fp32, our names
    num_steps: int
    train_seconds: float

    @classmethod
    def read(cls, work: Path) -> TrainedWeights:
        """Reads `work/checkpoint.safetensors` without the optimizer's moments."""
        with safe_open(work / "checkpoint.safetensors", "pt") as file:
            names = [key for key in file.keys() if key.startswith("weight.")]  # noqa: SIM118
            weights = {key.removeprefix("weight."): file.get_tensor(key) for key in names}
            num_steps = int(file.get_tensor("optimizer.steps"))
            return cls(weights, num_steps, float(file.metadata()["spent"]))


def export(work: Path, folder: Path, shape: Shape, recipe: Recipe) -> int:
    """Writes the folder and returns its size in bytes. Raises ValueError above MAX_BYTES."""
    trained = TrainedWeights.read(work)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = to_hf(trained.weights, shape.num_experts)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    shutil.copyfile(work / "tokenizer.json", folder / "tokenizer.json")
    _write_json(folder / "config.json", model_config(shape, recipe.balance_weight))
    _write_json(folder / "generation_config.json", generation_config())
    _write_json(folder / "tokenizer_config.json", tokenizer_config(shape))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    card = model_card(shape, num_steps=trained.num_steps, train_seconds=trained.train_seconds)
    (folder / "README.md").write_text(card, encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"{folder} holds {size} bytes; the limit is {MAX_BYTES}.")
    return size


def load_exported(folder: Path, shape: Shape) -> Network:
    """Loads the exported bf16 weights into the network that was trained."""
    network = Network(shape)
    tensors = load_file(folder / "model.safetensors")
    names = [name for name, _ in network.named_parameters()]
    network.load_state_dict(from_hf(tensors, names, shape.num_experts))
    return network.eval()


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
