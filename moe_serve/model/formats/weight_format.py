"""The interface of a format of stored weights. One small file per format implements it.

A format knows matrices by their plain names. Norms, routers and other tensors that a checkpoint
stores in floats never come here: `WeightReader` reads them directly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from moe_kernels.interface.quantised_matrix import MatrixForm, QuantisedMatrix, ScaleFormat
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.checkpoint import Checkpoint, Shape


class WeightFormat(Protocol):
    """One way to store weights in few bits."""

    @property
    def name(self) -> str:
        """The name for logs, with the bits and the groups."""

    def parts(self, checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
        """Returns the stored tensors behind the weight `name`; empty if it is not stored in this
        format.
        """

    def expect(self, checkpoint: Checkpoint, name: str, shape: Shape) -> None:
        """Raises CheckpointError unless all parts exist with the right shapes and dtypes."""

    def form(
        self, checkpoint: Checkpoint, name: str, shape: Shape, expert: int | None
    ) -> MatrixForm:
        """Returns the form that `matrix` will have; reads headers, and small tensors at most."""

    def matrix(
        self, checkpoint: Checkpoint, name: str, shape: Shape, expert: int | None
    ) -> QuantisedMatrix:
        """Returns one matrix of `shape`; for a fused weight [E, ...] that of `expert`.

        It consists of views of the files where possible.
        """


def stem_of(name: str) -> str | None:
    """Converts `a.b.weight` to `a.b.`, under which linear layers keep packed parts; None for other
    names.
    """
    return name.removesuffix("weight") if name.endswith(".weight") else None


def present(checkpoint: Checkpoint, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in checkpoint)


def matrix_shape(checkpoint: Checkpoint, stored: str, shape: Shape, row_multiple: int) -> Shape:
    """Returns (N, K) of a weight that this format can pack: N a multiple of `row_multiple`."""
    if len(shape) != 2 or shape[0] % row_multiple:
        raise CheckpointError(
            f"{checkpoint.path(stored)}: tensor {stored} is packed, but config.json implies a "
            f"weight of shape {list(shape)}, which cannot be packed."
        )
    return shape


_SCALES: dict[str, ScaleFormat] = {"F16": "float16", "BF16": "bfloat16"}


def scale_format(checkpoint: Checkpoint, name: str) -> ScaleFormat:
    """Returns the type of the scales in a stored tensor; pure exponents become floats, except
    MXFP4's.
    """
    return _SCALES.get(checkpoint.header(name).dtype, "float32")
