"""Random adapters of a model, as PEFT and ESFT write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_serve.model.checkpoint.manifest import Stored, attention_table, expert_table
from moe_serve.model.load.loader import ModelLoader

_RANK = 16
_PARTS = ("q", "k", "v", "o")


def write_loras(loader: ModelLoader, root: Path, count: int, on: str) -> dict[str, str]:
    """Writes LoRAs of rank 16: all projections of grouped-query attention and, with "all", those of
    all experts. Returns the folders by name."""
    folders = {}
    for number in range(count):
        generator, matrices = torch.Generator().manual_seed(number), dict[str, Tensor]()
        for stored in _adapted_tensors(loader, on):
            num_outputs, num_inputs = stored.shape
            module = "base_model.model." + stored.name.removesuffix(".weight")
            a = torch.randn(_RANK, num_inputs, generator=generator)
            b = torch.randn(num_outputs, _RANK, generator=generator)
            matrices[f"{module}.lora_A.weight"] = (0.02 * a).bfloat16()
            matrices[f"{module}.lora_B.weight"] = (0.02 * b).bfloat16()
        folder = root / f"a{number}"
        folder.mkdir()
        config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(matrices, folder / "adapter_model.safetensors")
        folders[folder.name] = str(folder)
    return folders


def write_esfts(loader: ModelLoader, root: Path, count: int, share: float) -> dict[str, str]:
    """Writes ESFTs that replace this share of the experts of each layer, others for each adapter.
    Returns the folders by name."""
    spec, folders = loader.spec, {}
    num_own = max(1, round(share * spec.router.num_experts))
    layout = next(each for each in loader.names.experts if each.gate)
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        listed, weights = dict[str, list[int]](), dict[str, Tensor]()
        for layer in (i for i in range(spec.num_layers) if spec.layers[i].is_sparse):
            order = torch.randperm(spec.router.num_experts, generator=generator)
            listed[str(layer)] = sorted(order[:num_own].tolist())
            for expert in listed[str(layer)]:
                for stored in expert_table(layout, spec, layer, expert).values():
                    noise = torch.randn(stored.shape, generator=generator)
                    weights[stored.name] = (0.03 * noise).bfloat16()
        folder = root / f"a{number}"
        folder.mkdir()
        config = {"experts": listed, "shared_experts": False, "non_expert_modules": False}
        (folder / "expert_cfg.json").write_text(json.dumps(config))
        save_file(weights, folder / "model.safetensors")
        folders[folder.name] = str(folder)
    return folders


def _adapted_tensors(loader: ModelLoader, on: str) -> Iterator[Stored]:
    spec = loader.spec
    for layer in range(spec.num_layers):
        table = attention_table(loader.names, spec, layer)
        yield from (table[part] for part in _PARTS)
        if on == "all" and spec.layers[layer].is_sparse:
            layout = next(each for each in loader.names.experts if each.gate)
            for expert in range(spec.router.num_experts):
                yield from expert_table(layout, spec, layer, expert).values()
