"""Reads the weights of a checkpoint, either as floats, regardless of their stored format, or as
they are stored.

A tensor that is stored in floats under its own name is read directly, also in a quantised
checkpoint: norms, routers, heads and modules excluded from quantisation. All other weights are read
through the format that the config names, one matrix at a time.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moe_kernels.interface.quantised_matrix import MatrixForm, QuantisedMatrix
from moe_serve.model.checkpoint.checkpoint import FLOAT_DTYPES, Checkpoint, Shape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.manifest import Stored
from moe_serve.model.formats import WeightFormat, format_of


class WeightSource(Protocol):
    """Logical weights by name: the loader's interface to a checkpoint, or to any replacement of
    one.

    Several threads may read at once. `shape` is always that of the whole weight; `expert` requests
    one of a fused [E, ...].
    """

    @property
    def format_name(self) -> str:
        """The stored format of the experts' weights, for logs: "plain", "mxfp4", ..."""
        ...

    def has(self, name: str) -> bool:
        """Returns whether the weight exists in any form."""
        ...

    def stored_dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a weight in floats; float32 for a quantised one."""
        ...

    def expect(self, name: str, shape: Shape) -> None:
        """Raises CheckpointError unless the weight exists with this shape. Reads no weights."""
        ...

    def read(
        self, name: str, shape: Shape, dtype: torch.dtype, expert: int | None = None
    ) -> Tensor:
        """Reads the weight in `dtype`; it must not be written to,
        and must be copied before `done`.
        """
        ...

    def form(self, name: str, shape: Shape, expert: int | None = None) -> MatrixForm | None:
        """Returns the form of `read_packed`'s result; None for a weight in floats."""
        ...

    def read_packed(self, name: str, shape: Shape, expert: int | None = None) -> QuantisedMatrix:
        """Reads a weight that has a form, in few bits; if the form is transposed, its transpose."""
        ...

    def done(self, name: str, expert: int | None = None) -> None:
        """Notes that the caller has copied the weight."""
        ...

    def copying(self) -> WeightSource:
        """Returns the same weights for reads while requests run.

        Each read uses new memory, and a failed read raises CheckpointError.
        """
        ...


# Takes a checkpoint's folder and its config (the text model's part).
OpenWeights = Callable[[Path, HFConfig], WeightSource]


_log = logging.getLogger(__name__)


def open_checkpoint(folder: Path, config: HFConfig) -> WeightReader:
    """Opens a folder of safetensors: the source of a server's weights."""
    return WeightReader(Checkpoint(folder), config)


class WeightReader:
    """Implements WeightSource: reads logical weights of one checkpoint.

    Several threads may read at once.
    """

    def __init__(self, checkpoint: Checkpoint, config: HFConfig) -> None:
        self._checkpoint = checkpoint
        self._format: WeightFormat | None = format_of(config)
        _log.info("%s: weights are stored as %s", checkpoint.folder, self.format_name)

    @property
    def format_name(self) -> str:
        """The stored format of the experts' weights, for logs: "plain", "mxfp4", ..."""
        return "plain" if self._format is None else self._format.name

    def has(self, name: str) -> bool:
        """Returns whether the weight exists in any form."""
        return name in self._checkpoint or bool(self._parts(name))

    def stored_dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a weight in floats; float32 for a quantised one."""
        return self._checkpoint.view(name).dtype if self._is_plain(name) else torch.float32

    def expect(self, name: str, shape: Shape) -> None:
        """Checks the headers of all tensors behind a weight against its shape.

        Raises CheckpointError with the file and the tensor. Reads no weights.
        """
        if self._format is None or not self._parts(name) or self._is_plain(name):
            self._checkpoint.expect(name, [shape])
        else:
            self._format.expect(self._checkpoint, name, shape)

    def read(
        self, name: str, shape: Shape, dtype: torch.dtype, expert: int | None = None
    ) -> Tensor:
        """Reads the weight in `dtype`, on the CPU; it must not be written to.

        It may be a view of the file's pages or of another layout: copy it before `done`. For a
        fused weight [E, ...] it is that of `expert`, if given. `shape` is always that of the whole
        weight.
        """
        if self._format is None or self._is_plain(name):
            stored = self._checkpoint.view(name, expert)
            if stored.dtype == dtype:
                return stored
            weight = stored.to(dtype)
            self._checkpoint.drop(name, expert)
            return weight
        if expert is None and len(shape) == 3:
            return self._all_experts(name, shape, dtype)
        matrix_shape = shape if expert is None else shape[1:]
        matrix = self.read_packed(name, shape, expert)
        weight = matrix.dequantised(dtype)
        if matrix.form.is_transposed:
            weight = weight.t()
        assert weight.shape == matrix_shape, f"{name} is {weight.shape}, not {matrix_shape}"
        self.done(name, expert)
        return weight

    def form(self, name: str, shape: Shape, expert: int | None = None) -> MatrixForm | None:
        """Returns the form of `read_packed`'s result; None for a weight in floats.

        Reads next to nothing.
        """
        if self._format is None or self._is_plain(name):
            return None
        matrix_shape = shape if expert is None else shape[1:]
        return self._format.form(self._checkpoint, name, matrix_shape, expert)

    def read_packed(self, name: str, shape: Shape, expert: int | None = None) -> QuantisedMatrix:
        """Reads a weight that has a form, in few bits, on the CPU; copy it before `done`.

        If the form is transposed, the matrix is that of the weight's transpose.
        """
        assert self._format is not None, f"{name} is stored in floats"
        matrix_shape = shape if expert is None else shape[1:]
        return self._format.matrix(self._checkpoint, name, matrix_shape, expert)

    def done(self, name: str, expert: int | None = None) -> None:
        """Releases the weight's pages from this process's memory. The caller must have copied the
        weight.
        """
        for part in (name,) if self._is_plain(name) else self._parts(name):
            self._checkpoint.drop(part, expert)

    def copying(self) -> WeightReader:
        """See WeightSource."""
        other = copy.copy(self)
        other._checkpoint = self._checkpoint.copying()
        return other

    def _all_experts(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        weights = torch.empty(shape, dtype=dtype)
        for expert, weight in enumerate(weights):
            weight.copy_(self.read(name, shape, dtype, expert))
        return weights

    def _is_plain(self, name: str) -> bool:
        checkpoint = self._checkpoint
        return name in checkpoint and checkpoint.header(name).dtype in FLOAT_DTYPES

    def _parts(self, name: str) -> tuple[str, ...]:
        return () if self._format is None else self._format.parts(self._checkpoint, name)


LoadProgress = Callable[[int, int], None]  # (tensors read, tensors in all)


class ModelTensors:
    """The weights of a checkpoint.

    Results of `read` may be views of the file: copy them, or make a layer of them, before `done`.

    Several threads may read at once.
    """

    def __init__(
        self,
        reader: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        num_tensors: int,
        progress: LoadProgress | None,
    ) -> None:
        self._reader, self._dtype, self._device = reader, dtype, device
        self._copies = reader.copying()
        self._total, self._done, self._progress = num_tensors, 0, progress
        self._lock = threading.Lock()

    def read(
        self, stored: Stored, dtype: torch.dtype | None = None, expert: int | None = None
    ) -> Tensor:
        """Reads a weight in floats; for a fused weight [E, ...] that of `expert`, if given."""
        tensor = self._reader.read(stored.name, stored.shape, dtype or self._dtype, expert)
        self._count(expert)
        return tensor.to(self._device)

    def read_packed(self, stored: Stored, expert: int | None = None) -> QuantisedMatrix:
        """Reads a weight packed in few bits."""
        matrix = self._reader.read_packed(stored.name, stored.shape, expert)
        self._count(expert)
        return matrix.to(self._device)

    def keep(self, stored: Stored, dtype: torch.dtype | None = None) -> Tensor:
        """Reads a weight into new memory without holding pages of the file, so that an embedding
        takes its size only once.
        """
        tensor = self._copies.read(stored.name, stored.shape, dtype or self._dtype)
        self._count(None)
        return tensor.to(self._device)

    def done(self, stored: Stored, expert: int | None = None) -> None:
        """Releases a weight's pages. The caller must have copied the weight."""
        self._reader.done(stored.name, expert)

    def _count(self, expert: int | None) -> None:
        """Counts a tensor as read; a fused tensor counts once."""
        with self._lock:
            self._done += 0 if expert else 1
            if self._progress is not None:
                self._progress(self._done, self._total)
