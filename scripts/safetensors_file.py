"""Reads the tensors of a checkpoint folder as numpy views of the mapped files. Needs only numpy.

numpy has no bfloat16, so such a tensor is returned as uint16 with the same bits.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """`data` is a view of the mapped file; `dtype` is "F32", "F16" or "BF16"."""

    dtype: str
    data: np.ndarray[Any, Any]

    def as_float32(self) -> np.ndarray[Any, Any]:
        if self.dtype == "BF16":  # the upper half of a float32
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data.astype(np.float32)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns every tensor of every `*.safetensors` in the folder, by name."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= _read_file(path)
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    """Reads a file: the length of its header (uint64), the header as JSON, and the tensors'
    bytes.
    """
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    (length,) = struct.unpack("<Q", mapped[:8].tobytes())
    header: dict[str, Any] = json.loads(mapped[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        view = mapped[start:end].view(_NUMPY[entry["dtype"]])
        assert view.size == math.prod(entry["shape"]), f"{name} in {path.name} has a wrong length"
        tensors[name] = Tensor(entry["dtype"], view.reshape(entry["shape"]))
    return tensors
