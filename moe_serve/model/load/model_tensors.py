"""Reads a checkpoint's weights in the model's dtype onto its device, and counts them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from moe_kernels.interface.quantised_matrix import QuantisedMatrix
from moe_serve.model.checkpoint.manifest import Stored
from moe_serve.model.load.weight_reader import WeightSource

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
        self._total, self._done, self._progress = num_tensors, 0, progress
        self._lock = threading.Lock()

    def read(
        self, stored: Stored, dtype: torch.dtype | None = None, expert: int | None = None
    ) -> Tensor:
        """Read a weight in floats; for a fused weight [E, ...] that of `expert`, if given."""
        tensor = self._reader.read(stored.name, stored.shape, dtype or self._dtype, expert)
        self._count(expert)
        return tensor.to(self._device)

    def read_packed(self, stored: Stored, expert: int | None = None) -> QuantisedMatrix:
        """Read a weight packed in few bits."""
        matrix = self._reader.read_packed(stored.name, stored.shape, expert)
        self._count(expert)
        return matrix.to(self._device)

    def keep(self, stored: Stored, dtype: torch.dtype | None = None) -> Tensor:
        """Read a weight as a copy."""
        tensor = self.read(stored, dtype).clone()
        self.done(stored)
        return tensor

    def done(self, stored: Stored, expert: int | None = None) -> None:
        """Release a weight's pages; the caller has copied it."""
        self._reader.done(stored.name, expert)

    def _count(self, expert: int | None) -> None:
        """Count a tensor as read; a fused tensor counts once."""
        with self._lock:
            self._done += 0 if expert else 1
            if self._progress is not None:
                self._progress(self._done, self._total)
