"""Random fine-tunes of a checkpoint, BitDelta adapters of them, and the checkpoint that an adapter
stands for, computed in fp64 without any code of moe_serve."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.adapters.adapter_folders import tensors_of


def write_fine_tune(
    folder: Path, base: Path, *, seed: int = 0, size: float = 0.1, has_routers: bool = True
) -> Path:
    """Writes a checkpoint in which every tensor differs a little from the base's. `has_routers`:
    that of a router too."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    generator = torch.Generator().manual_seed(seed)
    weights = tensors_of(base)
    tuned = {
        name: weight + size * torch.randn(weight.shape, generator=generator).to(weight.dtype)
        for name, weight in weights.items()
        if has_routers or not name.endswith(".mlp.gate.weight")
    }
    tuned = weights | tuned
    save_file(tuned, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_merged(folder: Path, base: Path, adapter: Path) -> Path:
    """Writes the checkpoint that an adapter of it stands for."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights = tensors_of(base)
    own = load_file(adapter / "model.safetensors")
    for name, value in own.items():
        if name.endswith(".delta_sign"):
            module = name.removesuffix(".delta_sign")
            added = dense(value, own[f"{module}.delta_scale"])
            _add(weights, module, added)
        elif not name.endswith(".delta_scale"):
            weights[name] = value.to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def dense(sign: Tensor, scale: Tensor) -> Tensor:
    """Returns scale * (1 where a bit is set, else -1), in fp64, with the padding of each row."""
    bits = torch.stack([(sign >> i) & 1 for i in range(8)], dim=2).flatten(1)
    return (2.0 * bits.double() - 1.0) * scale.double().reshape(-1, 1)


def _add(weights: dict[str, Tensor], module: str, added: Tensor) -> None:
    matrix = weights.get(f"{module}.weight")
    if matrix is None:
        matrix = _fused(weights, module)
    matrix.copy_((matrix.double() + added[:, : matrix.shape[1]]).to(matrix.dtype))


_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}  # the names of Mixtral


def _fused(weights: dict[str, Tensor], module: str) -> Tensor:
    """Returns the part of a tensor of all experts that is one matrix, as a view."""
    parent, expert, last = module.rsplit(".", 2)
    part = _PARTS.get(last, last.removesuffix("_proj"))
    if last in _PARTS:  # Granite: [E, out, in], gate before up
        ending = "output_linear" if part == "down" else "input_linear"
        whole = weights[f"{parent.removesuffix('experts')}{ending}.weight"][int(expert)]
        half = len(whole) // 2
        return {"gate": whole[:half], "up": whole[half:], "down": whole}[part]
    ending = "down_proj" if part == "down" else "gate_up_proj"  # GPT-OSS: [E, in, out], by turns
    whole = weights[f"{parent}.{ending}"][int(expert)].T
    return {"gate": whole[0::2], "up": whole[1::2], "down": whole}[part]
