"""Merges an adapter into its base model, and writes the result as a checkpoint.

A LoRA is added to the stored matrices in fp32, and the sum is rounded once. The experts of an ESFT
replace the stored ones. Only the adapter and one tensor are in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from moe_serve.adapters.adapter_files import AdapterFiles, open_unchanged
from moe_serve.adapters.adapter_part import WHOLE
from moe_serve.adapters.esft import read_esft
from moe_serve.adapters.peft_config import read_peft_config
from moe_serve.adapters.peft_lora import LowRankMatrices, read_lora
from moe_serve.adapters.targets import AdaptedMatrix, AdapterTargets
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.checkpoint import Checkpoint
from moe_serve.model.checkpoint.checkpoint_writer import (
    CheckpointWriter,
    check_target,
    files_beside,
)
from moe_serve.model.checkpoint.safetensors_writer import PlannedTensor
from moe_serve.model.load.loader import ModelLoader

_MAX_RANK = 1024  # that of adapters.max_rank
_Change = LowRankMatrices | Tensor  # an addition to a matrix, or its replacement


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedSize:
    """The number of tensors in a merged checkpoint, and the number of changed ones."""

    num_tensors: int
    num_changed: int


def merge_adapter(
    base: Path,
    adapter: Path,
    out: Path,
    progress: Callable[[int, int], None] | None = None,
) -> MergedSize:
    """Writes the checkpoint that an adapter stands for. Raises CheckpointError for an adapter that
    does not fit, or whose matrices the base model does not store as floats one by one."""
    check_target(out)
    loader = ModelLoader(base, kernels="torch")
    with Checkpoint(base) as checkpoint, open_unchanged(adapter) as files:
        changes = _changes(files, AdapterTargets(loader), checkpoint)
        names = list(checkpoint)
        plan = []
        for name in names:
            tensor = checkpoint.view(name)
            plan.append(PlannedTensor(name, tensor.dtype, tuple(tensor.shape)))
        with CheckpointWriter(out, plan) as writer:
            for number, name in enumerate(names):
                tensor, change = checkpoint.view(name), changes.get(name)
                writer.write(name, [tensor if change is None else _changed(tensor, change)])
                checkpoint.drop(name)
                if progress is not None:
                    progress(number + 1, len(names))
            config = json.loads((base / "config.json").read_text(encoding="utf-8"))
            writer.finish(config, files_beside(base))
    return MergedSize(num_tensors=len(names), num_changed=len(changes))


def _changes(
    files: AdapterFiles, targets: AdapterTargets, checkpoint: Checkpoint
) -> Mapping[str, _Change]:
    """Returns the changes by the name of the stored tensor."""
    if files.is_bitdelta:
        raise CheckpointError(
            f"{files.folder} is a BitDelta adapter, which cannot be merged: serve the fine-tune "
            "that it was made from."
        )
    stored: dict[AdaptedMatrix, str] = {}
    for module, target in targets.modules.items():
        if f"{module}.weight" in checkpoint:
            stored[target] = f"{module}.weight"
    found: dict[str, _Change] = {}
    for target, change in _read(files, targets):
        name = stored.get(target)
        if name is None or not checkpoint.view(name).is_floating_point():
            raise CheckpointError(
                f"{files.folder} changes {target.part} of layer {target.layer}, which "
                f"{checkpoint.folder} does not store as a separate matrix of floats: serve the "
                "adapter beside the base model."
            )
        found[name] = change
    return found


def _read(files: AdapterFiles, targets: AdapterTargets) -> list[tuple[AdaptedMatrix, _Change]]:
    if files.is_lora:
        config = read_peft_config(files.config_path, files.config, _MAX_RANK)
        added = read_lora(files, config, targets, WHOLE.wants)
        return [(target, each) for target, each in added if each is not None]
    replaced = read_esft(files, targets, WHOLE.wants)
    return [(target, each) for target, each in replaced.items() if each is not None]


def _changed(tensor: Tensor, change: _Change) -> Tensor:
    if isinstance(change, Tensor):
        return change.to(tensor.dtype)
    return (tensor.float() + change.delta()).to(tensor.dtype)
