"""How often experts were chosen, as a file: what planners need, and all that some engines tell.

A safetensors file with one tensor, `counts`: float64 [S, L, E] for S steps (or windows, or 1 for
a sum), L layers and E experts of a layer. Its facts are the other fields of `ExpertLoad`.
Reading it needs numpy and safetensors, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from routing_predictor.traces.errors import TraceError
from routing_predictor.traces.metadata import read_tensors, write_tensors
from routing_predictor.traces.trace import RoutingTrace
from routing_predictor.traces.trace_stats import windows

FORMAT, VERSION = "moe-serve expert load", 1
_MOST = 2.0**53  # of choices: beyond it, floats do not count


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Counts of choices by logical expert. Raises TraceError where they cannot be counts."""

    counts_SLE: NDArray[np.float64]
    layers: tuple[int, ...]  # the model's numbers of the L layers
    source: str = ""  # what told it: "sglang", "vllm", "trtllm", "csv", "trace"
    model: str = ""
    model_identity: str = ""

    def __post_init__(self) -> None:
        shape = self.counts_SLE.shape
        if len(shape) != 3 or not all(shape):
            raise TraceError(f"counts have the shape {shape}; steps x layers x experts wanted")
        if shape[1] != len(self.layers):
            raise TraceError(f"counts of {shape[1]} layers, but {len(self.layers)} are named")
        wrong_SLE = ~((self.counts_SLE >= 0) & (self.counts_SLE <= _MOST))
        if wrong_SLE.any():
            step, row, expert = np.argwhere(wrong_SLE)[0]
            raise TraceError(
                f"{int(wrong_SLE.sum())} counts are negative, not finite or above 2^53; the first "
                f"is {self.counts_SLE[step, row, expert]} of expert {expert} in layer "
                f"{self.layers[row]}"
            )

    @property
    def num_experts(self) -> int:
        return int(self.counts_SLE.shape[2])

    def total(self) -> NDArray[np.float64]:
        """[L, E]: the sum over all steps."""
        summed: NDArray[np.float64] = self.counts_SLE.sum(axis=0)
        return summed


def load_of_trace(trace: RoutingTrace, num_windows: int = 1) -> ExpertLoad:
    """A trace's counts, in equal runs of its tokens."""
    if not trace.num_tokens:
        raise TraceError("the trace has no tokens")
    return ExpertLoad(
        counts_SLE=windows(trace, num_windows).astype(np.float64),
        layers=trace.layers,
        source="trace",
        model=trace.model,
        model_identity=trace.model_identity,
    )


def write_load(load: ExpertLoad, path: Path) -> int:
    """-> bytes written. The file is there whole or not at all. Raises TraceError."""
    facts = {
        "layers": list(load.layers),
        "source": load.source,
        "model": load.model,
        "model_identity": load.model_identity,
    }
    return write_tensors(path, {"counts": load.counts_SLE}, facts, FORMAT, VERSION)


def read_load(path: Path) -> ExpertLoad:
    """Raises TraceError with what is wrong."""
    file = read_tensors(path, FORMAT, VERSION)
    layers = file.fact("layers", list)
    if not all(isinstance(layer, int) and layer >= 0 for layer in layers):
        raise TraceError(f"{path}: layers holds something that is no layer's number")
    try:
        return ExpertLoad(
            counts_SLE=file.tensor("counts", "f", 3).astype(np.float64, copy=False),
            layers=tuple(layers),
            source=file.fact("source", str),
            model=file.fact("model", str),
            model_identity=file.fact("model_identity", str),
        )
    except TraceError as error:
        named = str(error)
        raise TraceError(named if named.startswith(str(path)) else f"{path}: {named}") from None
