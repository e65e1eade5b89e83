"""Writes a BitDelta adapter, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_serve.adapters.adapter_files import BITDELTA_CONFIG
from moe_serve.adapters.bitdelta.tensors import FORMAT, SCALE, SIGN, VERSION
from moe_serve.errors import ConfigError
from moe_serve.model.checkpoint.safetensors_writer import PlannedTensor, SafetensorsWriter

WEIGHTS = "model.safetensors"
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Signs:
    """A matrix [N, K] as it is stored: bits and scale."""

    bits_NB: Tensor
    scales: Tensor  # fp32, [1] or [N]


@dataclass(frozen=True, slots=True)
class SignedEntry:
    """A matrix that will be written; `read` computes it."""

    module: str
    shape: tuple[int, ...]
    num_scales: int
    read: Callable[[], Signs]


@dataclass(frozen=True, slots=True)
class FullEntry:
    """A tensor that will be written in full."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class BitDeltaSize:
    """The bytes of an adapter, and of what it stands for in bf16."""

    num_matrices: int
    matrix_bytes: int
    matrix_bf16_bytes: int
    num_full: int
    full_bytes: int


def write_bitdelta(
    out: Path,
    signed: Iterable[SignedEntry],
    full: Iterable[FullEntry],
    notes: dict[str, str],
    progress: Callable[[int, int], None] | None = None,
) -> BitDeltaSize:
    """Writes an adapter, holding one matrix at a time. The configuration comes last, so an
    unfinished folder is no adapter; it is removed if an error ends the work."""
    signed, full = list(signed), list(full)
    if not signed and not full:
        raise ConfigError("Both checkpoints have equal weights: there is no difference to store.")
    with new_folder(out):
        writer = SafetensorsWriter(out / WEIGHTS, _plan(signed, full))
        try:
            total = len(signed) + len(full)
            for done, entry in enumerate(signed):
                signs = entry.read()
                writer.write(entry.module + SIGN, [signs.bits_NB])
                writer.write(entry.module + SCALE, [signs.scales.float()])
                if progress is not None:
                    progress(done + 1, total)
            for done, tensor in enumerate(full):
                writer.write(tensor.name, [tensor.read().to(tensor.dtype)])
                if progress is not None:
                    progress(len(signed) + done + 1, total)
            writer.finish()
        finally:
            writer.close()
        config = {"format": FORMAT, "version": VERSION, **notes}
        (out / BITDELTA_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return _size(signed, full)


def check_new(out: Path) -> None:
    """Raises ConfigError if the folder exists already."""
    if out.exists():
        raise ConfigError(f"--out is {out}, which exists: name a new folder.")


@contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """Makes a folder, and removes it if an error ends the block. Raises ConfigError if it is
    there."""
    check_new(out)
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out is {out}, which cannot be made: {error.strerror}.") from None
    try:
        yield
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _plan(signed: list[SignedEntry], full: list[FullEntry]) -> list[PlannedTensor]:
    planned = []
    for entry in signed:
        num_rows, width = entry.shape
        planned += [
            PlannedTensor(entry.module + SIGN, torch.uint8, (num_rows, -(-width // 8))),
            PlannedTensor(entry.module + SCALE, torch.float32, (entry.num_scales,)),
        ]
    return planned + [PlannedTensor(each.name, each.dtype, each.shape) for each in full]


def _size(signed: list[SignedEntry], full: list[FullEntry]) -> BitDeltaSize:
    weights = sum(entry.shape[0] * entry.shape[1] for entry in signed)
    plan = _plan(signed, full)
    in_signs = sum(each.nbytes for each in plan[: 2 * len(signed)])
    return BitDeltaSize(
        num_matrices=len(signed),
        matrix_bytes=in_signs,
        matrix_bf16_bytes=weights * _BF16_BYTES,
        num_full=len(full),
        full_bytes=sum(each.nbytes for each in plan) - in_signs,
    )
