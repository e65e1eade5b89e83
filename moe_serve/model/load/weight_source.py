"""Where a model's weights come from, as the loader sees it: a checkpoint, or anything like one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moe_kernels.interface.matrix_form import MatrixForm
from moe_kernels.interface.quantised_matrix import QuantisedMatrix
from moe_serve.model.checkpoint.checkpoint import Shape
from moe_serve.model.checkpoint.hf_config import HFConfig


class WeightSource(Protocol):
    """Logical weights by name. Threads may read at once.

    `shape` is always that of the whole weight; `expert` asks for one of a fused [E, ...].
    """

    @property
    def format_name(self) -> str:
        """What the experts' weights are stored as, for logs: "plain", "mxfp4", ..."""
        ...

    def has(self, name: str) -> bool:
        """The weight is there in some form."""
        ...

    def stored_dtype(self, name: str) -> torch.dtype:
        """Of a weight in floats; float32 for one that is quantised."""
        ...

    def expect(self, name: str, shape: Shape) -> None:
        """Raises CheckpointError unless the weight is there with this shape. Reads no weights."""
        ...

    def read(
        self, name: str, shape: Shape, dtype: torch.dtype, expert: int | None = None
    ) -> Tensor:
        """The weight in `dtype`; nobody may write to it, and it is copied before `done`."""
        ...

    def form(self, name: str, shape: Shape, expert: int | None = None) -> MatrixForm | None:
        """What `read_packed` would give; None for a weight in floats."""
        ...

    def read_packed(self, name: str, shape: Shape, expert: int | None = None) -> QuantisedMatrix:
        """A weight that has a form, in few bits; where that is transposed, its transpose."""
        ...

    def done(self, name: str, expert: int | None = None) -> None:
        """The caller has copied the weight."""
        ...

    def copying(self) -> WeightSource:
        """The same weights, to be read while requests run: each time into fresh memory, and what
        cannot be read raises CheckpointError."""
        ...


# Of a checkpoint's folder and its config (the text model's part).
OpenWeights = Callable[[Path, HFConfig], WeightSource]
