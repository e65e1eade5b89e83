"""Random adapters of a tiny checkpoint, and the checkpoint that contains what an adapter changes.

The merged checkpoint is computed here in fp64, by the published formula and without any code of
moe_serve: it is the reference of an adapter's answers.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = re.compile(r".*\.self_attn\.(?!kv_b)\w+_proj(_with_mqa)?\.weight")
EXPERTS = re.compile(r".*\.(experts\.\d+|shared_expert|shared_experts)\.\w+\.weight")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Reads all tensors of a checkpoint."""
    return {
        k: t for path in sorted(folder.glob("*.safetensors")) for k, t in load_file(path).items()
    }


def write_lora(
    folder: Path,
    base: Path,
    *,
    seed: int = 0,
    pattern: re.Pattern[str] = ATTENTION,
    rank: int = 4,
    size: float = 0.3,
    **config: Any,
) -> Path:
    """Writes a LoRA of all matrices whose names match, as PEFT does."""
    generator = torch.Generator().manual_seed(seed)
    matrices: dict[str, Tensor] = {}
    for name, weight in tensors_of(base).items():
        if pattern.fullmatch(name) and weight.dim() == 2:
            module = "base_model.model." + name.removesuffix(".weight")
            own = config.get("rank_pattern", {}).get(module.rpartition(".")[2], rank)
            num_outputs, num_inputs = weight.shape
            matrices[f"{module}.lora_A.weight"] = size * torch.randn(
                own, num_inputs, generator=generator
            )
            matrices[f"{module}.lora_B.weight"] = size * torch.randn(
                num_outputs, own, generator=generator
            )
    assert matrices, f"{base} has no tensor that matches"
    return write_peft(folder, matrices, r=rank, **config)


def write_peft(folder: Path, matrices: Mapping[str, Tensor], **config: Any) -> Path:
    """Write matrices with a configuration of PEFT; `config` overrides its fields."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "bias": "none", "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    save_file(
        {k: t.contiguous() for k, t in matrices.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def write_esft(
    folder: Path, base: Path, experts: Mapping[int, Iterable[int]], *, seed: int = 0
) -> Path:
    """Write other weights for some experts of a checkpoint with separate experts."""
    generator = torch.Generator().manual_seed(seed)
    listed = {str(layer): list(ids) for layer, ids in experts.items()}
    own = {}
    for name, weight in tensors_of(base).items():
        found = re.search(r"layers\.(\d+)\..*experts\.(\d+)\.", name)
        if found and int(found[2]) in listed.get(found[1], ()):
            own[name] = weight + 0.3 * torch.randn(weight.shape, generator=generator)
    assert own, f"{base} has no separate experts"
    folder.mkdir(parents=True, exist_ok=True)
    config = {"experts": listed, "shared_experts": False, "non_expert_modules": False}
    (folder / "expert_cfg.json").write_text(json.dumps(config))
    save_file(own, folder / "model.safetensors")
    return folder


def write_merged(
    folder: Path, base: Path, adapter: Path, changed: Mapping[str, Tensor] | None = None
) -> Path:
    """Writes the checkpoint with what an adapter changes: `changed`, or what is found by name."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights = tensors_of(base)
    if changed is not None:
        weights |= changed
    elif (adapter / "expert_cfg.json").exists():
        weights |= tensors_of(adapter)
    else:
        weights |= _with_additions(weights, adapter)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _with_additions(weights: Mapping[str, Tensor], adapter: Path) -> dict[str, Tensor]:
    config = json.loads((adapter / "adapter_config.json").read_text())
    matrices, changed = tensors_of(adapter), {}
    for name, a in matrices.items():
        module, side, _ = name.rpartition(".lora_A.weight")
        if not side:
            continue
        last = module.rpartition(".")[2]
        rank = config.get("rank_pattern", {}).get(last, config["r"])
        alpha = config.get("alpha_pattern", {}).get(last, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        target = module.removeprefix("base_model.model.") + ".weight"
        delta = scale * matrices[f"{module}.lora_B.weight"].double() @ a.double()
        changed[target] = (weights[target].double() + delta).to(weights[target].dtype)
    return changed
