"""A checkpoint's weights as the model holds them: in its dtype, on its device, counted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from moe_kernels.interface.quantised_matrix import QuantisedMatrix
from moe_serve.model.checkpoint.manifest import Stored
from moe_serve.model.load.weight_source import WeightSource

LoadProgress = Callable[[int, int], None]  # (tensors read, tensors in all)


class ModelTensors:
    """What `read` gives may be a view of the file: copy it, or make a layer of it, before `done`.

    Threads may read at once.
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
        """In floats; of a fused weight [E, ...] that of `expert`, if given."""
        tensor = self._reader.read(stored.name, stored.shape, dtype or self._dtype, expert)
        self._count(expert)
        return tensor.to(self._device)

    def read_packed(self, stored: Stored, expert: int | None = None) -> QuantisedMatrix:
        """In few bits."""
        matrix = self._reader.read_packed(stored.name, stored.shape, expert)
        self._count(expert)
        return matrix.to(self._device)

    def keep(self, stored: Stored, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of one's own."""
        tensor = self.read(stored, dtype).clone()
        self.done(stored)
        return tensor

    def done(self, stored: Stored, expert: int | None = None) -> None:
        """It was copied: its pages may go."""
        self._reader.done(stored.name, expert)

    def _count(self, expert: int | None) -> None:
        """A fused tensor counts once."""
        with self._lock:
            self._done += 0 if expert else 1
            if self._progress is not None:
                self._progress(self._done, self._total)
