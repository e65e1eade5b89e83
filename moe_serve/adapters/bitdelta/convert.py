"""Converts a published BitDelta file, a dictionary that torch.save wrote, into an adapter.

<module>.mask    int32 [K / 32, N]; bit i of word (w, n) is set if the difference of input
                 32 w + i and output n is not negative
<module>.coeff   the scale
<name>           an embedding, a norm or a head, in full
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moe_kernels.interface.sign_matrix import SignMatrix
from moe_serve.adapters.bitdelta.published_file import PublishedFile
from moe_serve.adapters.bitdelta.tensors import full_tensors, sign_modules
from moe_serve.adapters.bitdelta.writer import (
    BitDeltaSize,
    FullEntry,
    SignedEntry,
    Signs,
    write_bitdelta,
)
from moe_serve.adapters.targets import AdapterTargets
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.manifest import Stored
from moe_serve.model.load.loader import ModelLoader

_MASK, _COEFF = ".mask", ".coeff"
_WORD_BITS = 32


def convert_bitdelta(
    file: Path,
    base: Path,
    out: Path,
    progress: Callable[[int, int], None] | None = None,
) -> BitDeltaSize:
    """Converts a file into an adapter. Full tensors that equal the base model's are left out.
    Raises CheckpointError for a file with anything else than such tensors.
    """
    loader = ModelLoader(base, kernels="torch")
    opened = PublishedFile(file)
    try:
        reading = _FileReading(file, opened, loader)
        signed, full = list(reading.signed()), list(reading.full())
        return write_bitdelta(out, signed, full, {"base": base.name, "scales": "matrix"}, progress)
    finally:
        opened.close()


class _FileReading:
    """The tensors of a file, by the names of the base model's."""

    def __init__(self, file: Path, opened: PublishedFile, loader: ModelLoader) -> None:
        self._file, self._opened, self._loader = file, opened, loader
        self._modules = sign_modules(AdapterTargets(loader))
        self._full: Mapping[str, Stored] = full_tensors(loader)
        self._reader = loader.reader.copying()

    def signed(self) -> Iterator[SignedEntry]:
        """Yields the matrices that adapters have as signs."""
        for name in self._masks():
            target = self._modules.get(name)
            if target is not None:
                self._check_shape(name, target.shape)
                yield SignedEntry(name, target.shape, 1, partial(self._signs, name))
            elif f"{name}.weight" not in self._full:
                raise self._error(f"{name[:200]} is no matrix of the base model")

    def full(self) -> Iterator[FullEntry]:
        """Yields the tensors in full: those of the file, and matrices that adapters have in full
        (kv_b_proj of latent attention)."""
        for name in self._masks():
            stored = self._full.get(f"{name}.weight")
            if stored is not None:
                self._check_shape(name, stored.shape)
                read = partial(self._dense, name, stored)
                yield FullEntry(stored.name, stored.shape, self._loader.dtype, read)
        for name, tensor in self._opened.tensors.items():
            if name.endswith((_MASK, _COEFF)):
                continue
            stored = self._full.get(name)
            if stored is None:
                raise self._error(f"{name[:200]} is no tensor of the base model that may change")
            if tensor.shape != stored.shape:
                raise self._error(
                    f"{name[:200]} has the shape {list(tensor.shape)}, but the base model has "
                    f"{list(stored.shape)}"
                )
            own = self._opened.read(name)
            if not own.is_floating_point():
                raise self._error(f"{name[:200]} is {own.dtype}, not floats")
            if not torch.equal(own.float(), self._base(stored)):
                yield FullEntry(name, stored.shape, own.dtype, partial(self._opened.read, name))

    def _base(self, stored: Stored) -> Tensor:
        return self._reader.read(stored.name, stored.shape, torch.float32)

    def _masks(self) -> Iterator[str]:
        tensors = self._opened.tensors
        for name in tensors:
            module = name.removesuffix(_MASK)
            if module != name:
                if module + _COEFF not in tensors:
                    raise self._error(f"{name[:200]} has no {_COEFF[1:]}")
                yield module
            elif name.endswith(_COEFF) and name.removesuffix(_COEFF) + _MASK not in tensors:
                raise self._error(f"{name[:200]} has no {_MASK[1:]}")

    def _check_shape(self, module: str, shape: tuple[int, ...]) -> None:
        mask = self._opened.tensors[module + _MASK]
        wanted = (shape[1] // _WORD_BITS, shape[0])
        if mask.shape != wanted or shape[1] % _WORD_BITS or mask.storage != "IntStorage":
            raise self._error(
                f"{module[:200]}{_MASK} is a {mask.storage} of the shape {list(mask.shape)}, but "
                f"the base model needs an IntStorage of {list(wanted)}"
            )

    def _signs(self, module: str) -> Signs:
        words_NW = self._opened.read(module + _MASK).t().contiguous()
        is_one = self._opened.tensors[module + _COEFF].shape in ((), (1,))
        scale = self._opened.read(module + _COEFF).float().reshape(-1) if is_one else None
        if scale is None or not bool(torch.isfinite(scale).all()):
            raise self._error(f"{module[:200]}{_COEFF} must be one finite number")
        return Signs(words_NW.view(torch.uint8), scale)

    def _dense(self, module: str, stored: Stored) -> Tensor:
        signs = self._signs(module)
        matrix = SignMatrix(
            bits_NB=signs.bits_NB, num_columns=stored.shape[1], scales_N=signs.scales
        )
        return self._base(stored) + matrix.dense()

    def _error(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._file}: {why}.")
