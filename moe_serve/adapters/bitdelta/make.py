"""Makes a BitDelta adapter of a base checkpoint and a fine-tuned one.

The scale of a matrix, or of each of its rows, is the mean magnitude of the differences, which
minimises the sum of squared errors of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from moe_kernels.interface.sign_matrix import signs_of
from moe_serve.adapters.bitdelta.tensors import full_tensors, sign_modules
from moe_serve.adapters.bitdelta.writer import (
    BitDeltaSize,
    FullEntry,
    SignedEntry,
    Signs,
    write_bitdelta,
)
from moe_serve.adapters.targets import AdaptedMatrix, AdapterTargets
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.manifest import Stored
from moe_serve.model.load.loader import ModelLoader

ScalesName = Literal["matrix", "row"]
Read = Callable[[], Tensor]


def make_bitdelta(
    base: Path,
    tuned: Path,
    out: Path,
    scales: ScalesName = "matrix",
    progress: Callable[[int, int], None] | None = None,
) -> BitDeltaSize:
    """Writes the adapter, holding one matrix of each checkpoint at a time. Tensors that are equal
    in both are left out, so both are read twice. Raises CheckpointError and ConfigError."""
    models = [_opened(base), _opened(tuned)]
    _check_alike(models, base, tuned)
    readers = [_Weights(model) for model in models]
    signed = [
        SignedEntry(
            module, target.shape, 1 if scales == "matrix" else target.shape[0],
            partial(_signs, module, *reads, scales),
        )
        for module, target, reads in _matrices(readers)
        if not torch.equal(reads[0](), reads[1]())
    ]  # fmt: skip
    full = [entry for entry, own in _full(readers) if not torch.equal(own(), entry.read())]
    return write_bitdelta(out, signed, full, {"base": base.name, "scales": scales}, progress)


def _opened(folder: Path) -> ModelLoader:
    return ModelLoader(
        folder,
        dtype=torch.float32,
        kernels="torch",
        expert_weights="dequantised",
        linear_weights="dequantised",
    )


def _check_alike(models: list[ModelLoader], base: Path, tuned: Path) -> None:
    """Raises CheckpointError if the fine-tune is of another model."""
    ours, theirs = (replace(model.spec, dtype=None) for model in models)
    for field in fields(ours):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != other:
            raise CheckpointError(
                f"{tuned} is not a fine-tune of {base}: {field.name} is {str(other)[:80]}, not "
                f"{str(mine)[:80]}; an adapter must have the shapes and the configuration of its "
                "base model."
            )


def _signs(module: str, base: Read, tuned: Read, scales: ScalesName) -> Signs:
    delta_NK = tuned() - base()
    magnitudes = delta_NK.abs()
    mean = magnitudes.mean(dim=1) if scales == "row" else magnitudes.mean().reshape(1)
    if not bool(torch.isfinite(mean).all()):
        raise CheckpointError(f"{module} has values that are not finite in one of the checkpoints.")
    return Signs(signs_of(delta_NK), mean)


class _Weights:
    """Reads the matrices of a checkpoint in fp32, one at a time."""

    def __init__(self, model: ModelLoader) -> None:
        self.model, self.targets = model, AdapterTargets(model)
        self._experts, self._reader = model.live_experts(), model.reader.copying()

    def expert(self, target: AdaptedMatrix) -> Tensor:
        weights = self._experts.read(target.layer, target.expert)
        matrix = getattr(weights, target.part)
        assert isinstance(matrix, Tensor), "a checkpoint is read in floats"
        return matrix.float()

    def stored(self, item: Stored) -> Tensor:
        return self._reader.read(item.name, item.shape, torch.float32)


def _matrices(
    readers: list[_Weights],
) -> Iterator[tuple[str, AdaptedMatrix, tuple[Read, Read]]]:
    """Yields all matrices of the base model by the name of its module, with their reads."""
    base, tuned = readers
    theirs = {t: name for name, t in tuned.targets.modules.items() if t.kind != "expert"}
    seen = set()
    for module, target in sign_modules(base.targets).items():
        if target in seen:  # experts have a name for each layout of checkpoints
            continue
        seen.add(target)
        if target.kind == "expert":
            reads = tuple(partial(each.expert, target) for each in readers)
        else:
            names = (module, theirs[target])
            items = (Stored(f"{name}.weight", target.shape) for name in names)
            reads = tuple(
                partial(each.stored, item) for each, item in zip(readers, items, strict=True)
            )
        yield module, target, (reads[0], reads[1])


def _full(readers: list[_Weights]) -> Iterator[tuple[FullEntry, Read]]:
    """Yields all other tensors: what is written, and the base model's."""
    base, tuned = readers
    pairs = zip(full_tensors(base.model).values(), full_tensors(tuned.model).values(), strict=True)
    for ours, theirs in pairs:
        dtype = tuned.model.reader.stored_dtype(theirs.name)
        entry = FullEntry(ours.name, ours.shape, dtype, partial(tuned.stored, theirs))
        yield entry, partial(base.stored, ours)
