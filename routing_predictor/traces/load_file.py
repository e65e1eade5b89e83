"""Stores how often experts were chosen: planners need it, and some engines record nothing else.

A safetensors file with one tensor, `counts`: float64 [S, L, E] for S steps (or windows, or 1 for a
sum), L layers and E experts of a layer. Its facts are the other fields of `RecordedLoad`. Reading
it needs only numpy and safetensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from routing_predictor.traces.metadata import read_tensors, write_tensors
from routing_predictor.traces.routing_error import TraceError

FORMAT, VERSION = "moe-serve expert load", 1
_MOST = 2.0**53  # limit on counts; beyond it floats skip whole numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLoad:
    """Counts of choices by logical expert. Raises TraceError if they are not valid counts."""

    counts_SLE: NDArray[np.float64]
    layers: tuple[int, ...]  # the model's numbers of the L layers
    source: str = ""  # origin: "sglang", "vllm", "trtllm", "csv", "trace"
    model: str = ""
    model_identity: str = ""

    def __post_init__(self) -> None:
        shape = self.counts_SLE.shape
        if len(shape) != 3 or not all(shape):
            raise TraceError(f"counts must have the shape steps x layers x experts, got {shape}")
        if shape[1] != len(self.layers):
            raise TraceError(
                f"there are counts of {shape[1]} layers, but {len(self.layers)} layer numbers"
            )
        wrong_SLE = ~((self.counts_SLE >= 0) & (self.counts_SLE <= _MOST))
        if wrong_SLE.any():
            step, row, expert = np.argwhere(wrong_SLE)[0]
            raise TraceError(
                f"{int(wrong_SLE.sum())} counts are negative, not finite or above 2^53; "
                f"the first is {self.counts_SLE[step, row, expert]}, of expert {expert} in "
                f"layer {self.layers[row]}"
            )

    @property
    def num_experts(self) -> int:
        return int(self.counts_SLE.shape[2])

    def total(self) -> NDArray[np.float64]:
        """Returns [L, E]: the sum over all steps."""
        summed: NDArray[np.float64] = self.counts_SLE.sum(axis=0)
        return summed


def write_load(load: RecordedLoad, path: Path) -> int:
    """Writes the file completely or not at all; returns its bytes. Raises TraceError."""
    facts = {
        "layers": list(load.layers),
        "source": load.source,
        "model": load.model,
        "model_identity": load.model_identity,
    }
    return write_tensors(path, {"counts": load.counts_SLE}, facts, FORMAT, VERSION)


def read_load(path: Path) -> RecordedLoad:
    """Reads and checks a file. Raises TraceError."""
    file = read_tensors(path, FORMAT, VERSION)
    layers = file.fact("layers", list)
    if not all(isinstance(layer, int) and layer >= 0 for layer in layers):
        raise TraceError(f"{path}: layers holds a value that is not a layer number")
    try:
        return RecordedLoad(
            counts_SLE=file.tensor("counts", "f", 3).astype(np.float64, copy=False),
            layers=tuple(layers),
            source=file.fact("source", str),
            model=file.fact("model", str),
            model_identity=file.fact("model_identity", str),
        )
    except TraceError as error:
        named = str(error)
        raise TraceError(named if named.startswith(str(path)) else f"{path}: {named}") from None
