"""Creates random tensors of a checkpoint and writes them shard by shard; one shard is in memory at
a time."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .families import FAMILIES, Sizes, TensorSpec, model_config, tensor_specs

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def write_random_model(
    folder: Path, family: str, sizes: Sizes, *, dtype: str, seed: int, shard_bytes: int
) -> int:
    """Writes config, shards and index, and returns the number of parameters. The same seed gives
    the same files."""
    FAMILIES[family].check(sizes)
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(model_config(family, sizes, dtype), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    item_bytes = DTYPES[dtype].itemsize
    shards = split_into_shards(tensor_specs(family, sizes), shard_bytes // item_bytes)
    generator = torch.Generator().manual_seed(seed)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {spec.name: _draw(spec, generator).to(DTYPES[dtype]) for spec in shard}
        save_file(tensors, folder / name, {"format": "pt"})
        (folder / name).chmod(0o644)
        files |= dict.fromkeys(tensors, name)
    num_parameters = sum(math.prod(spec.shape) for shard in shards for spec in shard)
    index = {"metadata": {"total_size": num_parameters * item_bytes}, "weight_map": files}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return num_parameters


def borrow_tokenizer(source: Path, folder: Path) -> bool:
    """Copy the tokenizer of another checkpoint; False if it has no tokenizer."""
    for name in _TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    return (source / "tokenizer.json").exists()


def split_into_shards(specs: Iterable[TensorSpec], max_elements: int) -> list[list[TensorSpec]]:
    """Groups tensors in order; a shard has at most `max_elements` unless one tensor alone is
    larger."""
    shards: list[list[TensorSpec]] = [[]]
    room = max_elements
    for spec in specs:
        size = math.prod(spec.shape)
        if size > room and shards[-1]:
            shards.append([])
            room = max_elements
        shards[-1].append(spec)
        room -= size
    return shards


def _draw(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    if spec.std is None:
        return torch.ones(spec.shape)
    return torch.randn(spec.shape, generator=generator) * spec.std
