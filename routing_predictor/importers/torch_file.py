"""Reads files of `torch.save` without torch and without running anything: plain data and arrays.

The file is a zip: `<name>/data.pkl` describes the data, `<name>/data/<key>` holds a storage's
bytes.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing_predictor.importers.opcodes import StoredTensor, read_plain_data
from routing_predictor.traces.metadata import regular
from routing_predictor.traces.routing_error import TraceError

_DTYPES = {
    "DoubleStorage": "f8", "FloatStorage": "f4", "HalfStorage": "f2", "LongStorage": "i8",
    "IntStorage": "i4", "ShortStorage": "i2", "CharStorage": "i1", "ByteStorage": "u1",
    "BoolStorage": "?",
}  # fmt: skip
_MAX_SHARED = 2**18  # values, or bytes of arrays, beyond those of files without shared ones


def read_torch_file(path: Path) -> Any:
    """Reads a file. Raises TraceError if it is not such a file, or holds more than plain data."""
    try:
        with zipfile.ZipFile(regular(path)) as archive:
            return _TorchZip(archive, path.stat().st_size).read()
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist") from None
    except zipfile.BadZipFile:
        raise TraceError(
            f"{path} is not a zip file; torch.save writes zip files since version 1.6"
        ) from None
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except (OSError, EOFError, ValueError, RuntimeError) as error:  # the errors that zipfile raises
        reason = getattr(error, "strerror", None) or str(error) or "it ends early"
        raise TraceError(f"{path} cannot be read: {reason}") from None


class _TorchZip:
    """An open file. A pickle can share values with two bytes, so their total size is counted: a
    small file never becomes a large object."""

    def __init__(self, archive: zipfile.ZipFile, num_bytes: int) -> None:
        self._archive = archive
        self._storages: dict[str, bytes] = {}
        self._arrays: dict[StoredTensor, NDArray[Any]] = {}
        self._values_left = self._bytes_left = 4 * num_bytes + _MAX_SHARED
        entries = {entry.filename: entry for entry in archive.infolist()}
        described = [name for name in entries if name.endswith("/data.pkl")]
        if len(described) != 1:
            raise TraceError(f"it must have one description (data.pkl), but has {len(described)}")
        self._entries, self._root = entries, described[0].removesuffix("data.pkl")

    def read(self) -> Any:
        order = self._root + "byteorder"
        if order in self._entries and self._bytes(order) != b"little":
            raise TraceError("it is not stored in little-endian byte order")
        return self._filled(read_plain_data(self._bytes(self._root + "data.pkl")), 0)

    def _bytes(self, name: str) -> bytes:
        entry = self._entries.get(name)
        if entry is None:
            raise TraceError(f"it does not contain {name}")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise TraceError(f"{name} is compressed, as torch.save never does: refused")
        return self._archive.read(entry)

    def _filled(self, value: Any, depth: int) -> Any:
        """Returns the value with arrays in place of their descriptions."""
        if depth > 32:
            raise TraceError("its lists are nested more than 32 deep: refused")
        self._values_left -= 1
        if self._values_left < 0:
            raise TraceError("its lists refer to each other too often: refused")
        if isinstance(value, StoredTensor):
            if value not in self._arrays:
                self._arrays[value] = self._array(value)
            return self._arrays[value]
        if isinstance(value, dict):
            return {key: self._filled(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self._filled(item, depth + 1) for item in value])
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TraceError(
            f"it contains only a {type(value).__name__}, not a dict or a list: refused"
        )

    def _array(self, tensor: StoredTensor) -> NDArray[Any]:
        if tensor.storage not in _DTYPES:
            raise TraceError(
                f"it contains a tensor of {tensor.storage}, which is not a type for counts"
            )
        dtype = np.dtype("<" + _DTYPES[tensor.storage])
        if tensor.key not in self._storages:
            self._storages[tensor.key] = self._bytes(f"{self._root}data/{tensor.key}")
        content = self._storages[tensor.key]
        if len(content) != tensor.num_stored * dtype.itemsize:
            raise TraceError(
                f"storage {tensor.key} has {len(content)} bytes, which do not fit "
                f"{tensor.num_stored} values"
            )
        size = math.prod(tensor.shape)
        steps = zip(tensor.shape, tensor.strides, strict=True)
        last = tensor.offset + sum((count - 1) * stride for count, stride in steps)
        if size and (last >= tensor.num_stored or size > tensor.num_stored):
            raise TraceError(f"a tensor of {tensor.shape} reaches beyond its storage")
        self._bytes_left -= size * dtype.itemsize
        if self._bytes_left < 0:
            raise TraceError("its tensors share storage too often: refused")
        if not size:
            return np.zeros(tensor.shape, dtype)
        flat = np.frombuffer(content, dtype)[tensor.offset :]
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        view = np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)
        array: NDArray[Any] = view.copy()
        return array
