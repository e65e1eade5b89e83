"""Writes one safetensors file piece by piece, so that no tensor needs to be in memory as a whole.

The header comes first in the file, so names, dtypes and shapes are known before any value. Values
may then arrive in any order of tensors. The layout is that of `safetensors_file`; wider dtypes come
first, so that every tensor starts at a multiple of its item size.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0", torch.uint16: "U16",
    torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint32: "U32",
    torch.int32: "I32", torch.float32: "F32", torch.uint64: "U64", torch.int64: "I64",
    torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """Writes the planned tensors of one file."""

    def __init__(self, path: Path, plan: Sequence[PlannedTensor]) -> None:
        self._plan = {tensor.name: tensor for tensor in plan}
        assert len(self._plan) == len(plan), f"{path.name}: a tensor is planned twice"
        self._begins: dict[str, int] = {}
        position = 0
        for tensor in sorted(plan, key=lambda each: -each.dtype.itemsize):
            self._begins[tensor.name] = position
            position += tensor.nbytes
        header = self._header()
        self._data_start = len(header)
        self._file = path.open("xb")
        self._file.write(header)

    def _header(self) -> bytes:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, begin in self._begins.items():
            tensor = self._plan[name]
            entries[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, begin + tensor.nbytes],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def write(self, name: str, pieces: Iterable[Tensor]) -> None:
        """Writes a tensor's values once, in pieces of any size that follow one another."""
        planned = self._plan.pop(name)
        self._file.seek(self._data_start + self._begins[name])
        written = 0
        for piece in pieces:
            assert piece.dtype == planned.dtype, f"{name} is {piece.dtype}, not {planned.dtype}"
            values = piece.detach().cpu().contiguous().flatten()
            written += values.nbytes
            if values.nbytes:
                self._file.write(values.view(torch.uint8).numpy().data)
        assert written == planned.nbytes, f"{name} has {written} bytes, not {planned.nbytes}"

    def finish(self) -> None:
        """Writes everything through to the disk; every planned tensor must have been written."""
        assert not self._plan, (
            f"{len(self._plan)} tensors are missing, such as {next(iter(self._plan))}"
        )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Closes the file, finished or not."""
        self._file.close()
