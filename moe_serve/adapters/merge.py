"""Merges an adapter into its base model, and writes the result as a checkpoint.

A LoRA, or the signs of a BitDelta adapter, are added to the stored matrices in fp32, and the sum is
rounded once. The experts of an ESFT, and what a BitDelta adapter stores in full, replace the stored
tensors. Only the adapter and one tensor are in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from moe_kernels.interface.sign_matrix import SignMatrix
from moe_serve.adapters.adapter_files import AdapterFiles, open_unchanged
from moe_serve.adapters.adapter_part import WHOLE
from moe_serve.adapters.bitdelta.tensors import full_tensors, read_bitdelta, sign_modules
from moe_serve.adapters.esft import read_esft
from moe_serve.adapters.merge_places import MergePlace, merge_places
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
_Change = LowRankMatrices | SignMatrix | Tensor  # an addition to a matrix, or its replacement


@dataclass(frozen=True, slots=True)
class _PlacedChange:
    place: MergePlace
    change: _Change


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
    does not fit, or whose matrices the base model does not store in floats."""
    check_target(out)
    loader = ModelLoader(base, kernels="torch")
    with Checkpoint(base) as checkpoint, open_unchanged(adapter) as files:
        changes = _changes(files, loader, checkpoint)
        replaced = _replaced(files, loader, checkpoint)
        names = list(checkpoint)
        plan = []
        for name in names:
            tensor = checkpoint.view(name)
            plan.append(PlannedTensor(name, tensor.dtype, tuple(tensor.shape)))
        with CheckpointWriter(out, plan) as writer:
            for number, name in enumerate(names):
                tensor = replaced.get(name, checkpoint.view(name))
                own = changes.get(name)
                writer.write(name, [tensor if own is None else _changed(tensor, own)])
                checkpoint.drop(name)
                if progress is not None:
                    progress(number + 1, len(names))
            config = json.loads((base / "config.json").read_text(encoding="utf-8"))
            writer.finish(config, files_beside(base))
    return MergedSize(num_tensors=len(names), num_changed=len(changes) + len(replaced))


def _changes(
    files: AdapterFiles, loader: ModelLoader, checkpoint: Checkpoint
) -> Mapping[str, list[_PlacedChange]]:
    """Returns the changes by the name of the stored tensor."""
    targets = AdapterTargets(loader)
    places = merge_places(targets, loader, checkpoint)
    found: dict[str, list[_PlacedChange]] = {}
    for target, change in _matrices(files, targets, loader):
        place = places.get(target)
        if place is None:
            raise CheckpointError(
                f"{files.folder} changes {target.part} of layer {target.layer}, which "
                f"{checkpoint.folder} does not store in floats: merge it into the checkpoint that "
                "this one was made from, and quantise the result (moe-serve quantize), or serve "
                "the adapter beside the base model."
            )
        found.setdefault(place.name, []).append(_PlacedChange(place, change))
    return found


def _matrices(
    files: AdapterFiles, targets: AdapterTargets, loader: ModelLoader
) -> Iterator[tuple[AdaptedMatrix, _Change]]:
    """Yields the changed matrices. Reads them all, or the signs of a BitDelta adapter one by
    one."""
    if files.is_bitdelta:
        tensors = read_bitdelta(files, sign_modules(targets), full_tensors(loader))
        for target in tensors.signs:
            signs = tensors.matrix(target)
            assert signs is not None, f"no signs of {target}"
            yield target, signs
        return
    changes: Iterable[tuple[AdaptedMatrix, _Change | None]]
    if files.is_lora:
        config = read_peft_config(files.config_path, files.config, _MAX_RANK)
        changes = read_lora(files, config, targets, WHOLE.wants)
    else:
        changes = read_esft(files, targets, WHOLE.wants).items()
    for target, change in changes:
        if change is not None:
            yield target, change


def _replaced(
    files: AdapterFiles, loader: ModelLoader, checkpoint: Checkpoint
) -> Mapping[str, Tensor]:
    """Returns the tensors that a BitDelta adapter stores in full, by name."""
    if not files.is_bitdelta:
        return {}
    full = full_tensors(loader)
    tensors = read_bitdelta(files, sign_modules(AdapterTargets(loader)), full)
    found = {}
    for name in tensors.full:
        if name not in checkpoint:
            raise CheckpointError(
                f"{files.folder} has {name}, which {checkpoint.folder} does not store under this "
                "name: serve the adapter beside the base model."
            )
        own = tensors.tensor(full[name], checkpoint.view(name).dtype)
        assert own is not None, f"{name} is stored in full"
        found[name] = own
    return found


def _changed(tensor: Tensor, changes: Sequence[_PlacedChange]) -> Tensor:
    """Returns a stored tensor with the changes to its matrices, each rounded once."""
    whole = tensor.clone()
    for each in changes:
        matrix_NK, change = each.place.matrix(whole), each.change
        if isinstance(change, Tensor):
            matrix_NK.copy_(change)
            continue
        delta_NK = change.dense() if isinstance(change, SignMatrix) else change.delta()
        matrix_NK.copy_(matrix_NK.float() + delta_NK)
    return whole
