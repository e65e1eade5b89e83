"""Reads one safetensors file: the whole header is checked, and tensors are views of a memory map.

    8 bytes   N, the length of the header, little-endian
    N bytes   JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {}}
    the rest  the tensors' bytes in the order of their offsets, without holes and overlaps

The layout and its limits are those of the safetensors README, section "Format". Pages of the map
that were read stay in the process's memory until `drop` releases them.
"""

from __future__ import annotations

import copy
import math
import mmap
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_serve.errors import CheckpointError, shortened
from moe_serve.json_text import parse_json
from moe_serve.regular_file import regular_file

_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 64  # torch's limit
_LFS_POINTER = b"version https://git-lfs"
# Bits per value of every dtype of the format, and the torch dtypes of those that torch supports.
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "BOOL": 8,
    "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32,
    "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_TORCH_DTYPES = {
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32, "U64": torch.uint64,
    "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """The location of a tensor: bytes [begin, end) of its file."""

    dtype: str  # the format's name: BF16, F8_E4M3, ...
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """An open file.

    Opening reads and checks the header only; the first read of a tensor maps the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.headers: Mapping[str, TensorHeader] = _read_headers(path)
        except OSError as error:
            if not path.exists():
                link = " (a link to nothing)" if path.is_symlink() else ""
                raise CheckpointError(f"{path} is missing{link}: fetch it again.") from None
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        self._start_unread()

    def _start_unread(self) -> None:
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None
        self._bytes: Tensor | None = None
        self._opened: _OpenFile | None = None  # used by `copy`

    def again(self) -> SafetensorsFile:
        """Returns the same file with reads of its own; the header is not read again."""
        other = copy.copy(self)
        other._start_unread()
        return other

    def view(self, name: str, index: int | None = None) -> Tensor:
        """Returns the stored tensor, or one index of its first dimension, without a copy.

        A tensor that does not start at a multiple of its item size is copied. The memory under a
        view outlives `close`; it must not be written to.
        """
        header, dtype = self.headers[name], self._dtype(name)
        begin, end = self._range(name, index)
        shape = header.shape if index is None else header.shape[1:]
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        raw = self._mapped()[begin:end]
        if begin % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(shape)

    def copy(self, name: str, index: int | None = None) -> Tensor:
        """Returns a tensor as `view` does, read into its own memory.

        A read error raises an exception here; under a view it would end the process.
        """
        begin, end = self._range(name, index)
        dtype = self._dtype(name)
        raw = torch.empty(end - begin, dtype=torch.uint8)
        buffer: Any = raw.numpy()
        try:
            self._read_into(memoryview(buffer), begin)
        except OSError as error:
            why = error.strerror or str(error)
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read: {why}.") from None
        shape = self.headers[name].shape if index is None else self.headers[name].shape[1:]
        return raw.view(dtype).view(shape)

    def drop(self, name: str, index: int | None = None) -> None:
        """Releases the memory of the pages under a tensor; reading it again maps them again.

        Pages that contain parts of neighbouring tensors are released too: the next read of those
        waits a microsecond for the page cache.
        """
        begin, end = self._range(name, index)
        if sys.platform != "win32" and self._map is not None and begin < end:
            begin -= begin % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def close(self) -> None:
        """Drops the map; it is freed together with its last view."""
        with self._lock:
            self._map = self._bytes = None
            if self._opened is not None:
                self._opened.close()
            self._opened = None

    def _dtype(self, name: str) -> torch.dtype:
        stored = self.headers[name].dtype
        if stored not in _TORCH_DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name} has dtype {stored}, which is not served."
            )
        return _TORCH_DTYPES[stored]

    def _read_into(self, target: memoryview, begin: int) -> None:
        with self._lock:
            if self._opened is None:
                self._opened = _OpenFile(self.path)
            file = self._opened
        while target:
            num_bytes = file.read_into(target, begin)
            if not num_bytes:
                raise OSError(0, f"the file ends {len(target)} bytes early")
            begin, target = begin + num_bytes, target[num_bytes:]

    def _range(self, name: str, index: int | None) -> tuple[int, int]:
        header = self.headers[name]
        if index is None:
            return header.begin, header.end
        assert 0 <= index < header.shape[0], f"{name} has no index {index}: {header.shape}"
        size = (header.end - header.begin) // header.shape[0]
        return header.begin + index * size, header.begin + (index + 1) * size

    def _mapped(self) -> Tensor:
        """Returns all bytes of the file as one tensor."""
        with self._lock:
            if self._bytes is None:
                try:
                    self._map = _map_privately(self.path)
                except (OSError, ValueError) as error:
                    raise CheckpointError(f"{self.path} cannot be mapped: {error}.") from None
                self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            return self._bytes


class _OpenFile:
    """A file for reads at any offset; it is closed with its last user."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self.close = weakref.finalize(self, os.close, self._number)
        self._lock = threading.Lock()

    def read_into(self, target: memoryview, begin: int) -> int:
        """Reads into `target` -> the number of bytes read; 0 at the end of the file."""
        if hasattr(os, "preadv"):
            return os.preadv(self._number, [target], begin)
        with self._lock:
            os.lseek(self._number, begin, os.SEEK_SET)
            read = os.read(self._number, len(target))
        target[: len(read)] = read
        return len(read)


def _map_privately(path: Path) -> mmap.mmap:
    """Makes a copy-on-write map: torch wants writable buffers, and the file stays unchanged.

    It is never written to, so no memory is reserved for copies where the system allows that.
    """
    with path.open("rb") as file:
        if sys.platform == "win32":
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _read_headers(path: Path) -> dict[str, TensorHeader]:
    with regular_file(path).open("rb") as file:
        num_bytes = file.seek(0, 2)
        file.seek(0)
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the data: run `git lfs pull` in its folder."
            )
        if num_bytes < 8:
            raise _broken(path, f"it has {num_bytes} bytes")
        length = int.from_bytes(start[:8], "little")
        if length > _MAX_HEADER_BYTES:
            raise _broken(path, f"its header would be {length} bytes long")
        if 8 + length > num_bytes:
            raise _broken(path, f"its header has {length} bytes, but only {num_bytes - 8} follow")
        file.seek(8)
        text = file.read(length)
    try:
        entries = parse_json(text, _without_repeats)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise _broken(path, f"its header is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _broken(path, "its header is not a JSON object")
    entries.pop("__metadata__", None)
    headers = {name: _header(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_layout(path, headers, 8 + length, num_bytes)
    return headers


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a dict, refusing a tensor that is described twice; plain JSON accepts that."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} occurs twice")
    return entries


def _header(path: Path, name: str, entry: Any, data_start: int) -> TensorHeader:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _broken(path, f"tensor {name} has no dtype, shape and two data_offsets") from None
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _broken(path, f"tensor {name} has dtype {dtype!r}, which the format does not know")
    is_sound = isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS
    if not is_sound or not _are_counts((*shape, begin, end)):
        found = shortened(f"shape {shape!r}"), shortened(f"offsets {[begin, end]!r}")
        raise _broken(path, f"tensor {shortened(name)} has {' and '.join(found)}")
    num_bits = math.prod(shape) * _BITS[dtype]
    if num_bits != 8 * (end - begin):
        raise _broken(
            path, f"tensor {name} ({dtype} {shape}) needs {num_bits // 8} bytes, has {end - begin}"
        )
    return TensorHeader(
        dtype=dtype, shape=tuple(shape), begin=data_start + begin, end=data_start + end
    )


def _are_counts(values: tuple[Any, ...]) -> bool:
    is_whole = {*map(type, values)} == {int}  # a bool is no count
    return is_whole and min(values) >= 0 and max(values) < 2**63


def _check_layout(
    path: Path, headers: Mapping[str, TensorHeader], data_start: int, num_bytes: int
) -> None:
    """Checks that the tensors fill the file from the header to its last byte, without gaps or
    overlaps.
    """
    position = data_start
    for name, header in sorted(headers.items(), key=lambda item: (item[1].begin, item[1].end)):
        if header.end > num_bytes:
            raise _broken(
                path, f"tensor {name} would end at byte {header.end}, but it has {num_bytes} bytes"
            )
        if header.begin != position:
            what = "overlaps the one before" if header.begin < position else "leaves a hole before"
            raise _broken(path, f"tensor {name} {what}: byte {header.begin}, not {position}")
        position = header.end
    if position != num_bytes:
        raise _broken(path, f"its tensors end at byte {position}, but it has {num_bytes} bytes")


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a whole safetensors file ({why}): fetch it again.")
