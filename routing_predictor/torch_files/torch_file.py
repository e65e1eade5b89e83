"""Reads files of `torch.save` without torch and without running anything: plain data and arrays.

The file is a zip: `<name>/data.pkl` describes the data, `<name>/data/<key>` holds a storage's
bytes.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing_predictor.torch_files.opcodes import StoredTensor, read_plain_data
from routing_predictor.traces.metadata import regular
from routing_predictor.traces.routing_error import TorchFileError

BFLOAT16 = "BFloat16Storage"
_DTYPES = {
    "DoubleStorage": "f8", "FloatStorage": "f4", "HalfStorage": "f2", "LongStorage": "i8",
    "IntStorage": "i4", "ShortStorage": "i2", "CharStorage": "i1", "ByteStorage": "u1",
    "BoolStorage": "?", BFLOAT16: "u2",
}  # fmt: skip
_MAX_SHARED = 2**18  # values, or bytes of arrays, beyond those of files without shared ones


class TorchFile:
    """An open file, whose tensors are read on request. Raises TorchFileError."""

    def __init__(self, path: Path, *, is_keeping_storages: bool = False) -> None:
        """`is_keeping_storages`: bytes that were read stay in memory, for tensors that share
        them."""
        self._path, self._is_keeping = path, is_keeping_storages
        self._storages: dict[str, bytes] = {}
        with _named(path):
            self._archive = zipfile.ZipFile(regular(path))
            try:
                self.content = self._described()  # a StoredTensor in place of each tensor
            except BaseException:
                self._archive.close()
                raise

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._archive.close()

    def array(self, tensor: StoredTensor) -> NDArray[Any]:
        """Reads a tensor into its own memory. NumPy has no bfloat16: such values are uint16."""
        with _named(self._path):
            return self._array(tensor)

    def whole(self) -> Any:
        """Returns the data with arrays in place of tensors."""
        with _named(self._path):
            return _Filling(self._array, self._path.stat().st_size).filled(self.content, 0)

    def _described(self) -> Any:
        entries = {entry.filename: entry for entry in self._archive.infolist()}
        described = [name for name in entries if name.endswith("/data.pkl")]
        if len(described) != 1:
            raise TorchFileError(
                f"it must have one description (data.pkl), but has {len(described)}"
            )
        self._entries, self._root = entries, described[0].removesuffix("data.pkl")
        order = self._root + "byteorder"
        if order in self._entries and self._bytes(order) != b"little":
            raise TorchFileError("it is not stored in little-endian byte order")
        return read_plain_data(self._bytes(self._root + "data.pkl"))

    def _bytes(self, name: str) -> bytes:
        entry = self._entries.get(name)
        if entry is None:
            raise TorchFileError(f"it does not contain {name}")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise TorchFileError(f"{name} is compressed, as torch.save never does: refused")
        return self._archive.read(entry)

    def _storage(self, key: str) -> bytes:
        found = self._storages.get(key)
        if found is None:
            found = self._bytes(f"{self._root}data/{key}")
            if self._is_keeping:
                self._storages[key] = found
        return found

    def _array(self, tensor: StoredTensor) -> NDArray[Any]:
        dtype, content = dtype_of(tensor), self._storage(tensor.key)
        if len(content) != tensor.num_stored * dtype.itemsize:
            raise TorchFileError(
                f"storage {tensor.key} has {len(content)} bytes, which do not fit "
                f"{tensor.num_stored} values"
            )
        size = math.prod(tensor.shape)
        steps = zip(tensor.shape, tensor.strides, strict=True)
        last = tensor.offset + sum((count - 1) * stride for count, stride in steps)
        if size and (last >= tensor.num_stored or size > tensor.num_stored):
            raise TorchFileError(f"a tensor of {tensor.shape} reaches beyond its storage")
        if not size:
            return np.zeros(tensor.shape, dtype)
        flat = np.frombuffer(content, dtype)[tensor.offset :]
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        view = np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)
        array: NDArray[Any] = view.copy()
        return array


def dtype_of(tensor: StoredTensor) -> np.dtype[Any]:
    """Returns the type of a tensor's values in memory. Raises TorchFileError."""
    if tensor.storage not in _DTYPES:
        raise TorchFileError(
            f"it contains a tensor of {tensor.storage}, which is not a type that is read"
        )
    return np.dtype("<" + _DTYPES[tensor.storage])


def read_torch_file(path: Path) -> Any:
    """Reads a whole file. Raises TorchFileError if it is not such a file, or holds more than plain
    data."""
    with TorchFile(path, is_keeping_storages=True) as file:
        return file.whole()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Puts the path before the reason of every error."""
    try:
        yield
    except FileNotFoundError:
        raise TorchFileError(f"{path} does not exist") from None
    except zipfile.BadZipFile:
        raise TorchFileError(
            f"{path} is not a zip file; torch.save writes zip files since version 1.6"
        ) from None
    except TorchFileError as error:
        raise TorchFileError(f"{path}: {error}") from None
    except (OSError, EOFError, ValueError, RuntimeError) as error:  # the errors that zipfile raises
        reason = getattr(error, "strerror", None) or str(error) or "it ends early"
        raise TorchFileError(f"{path} cannot be read: {reason}") from None


class _Filling:
    """Puts arrays in place of their descriptions. A pickle can share values with two bytes, so
    their total size is counted: a small file never becomes a large object."""

    def __init__(self, array: Callable[[StoredTensor], NDArray[Any]], num_bytes: int) -> None:
        self._read = array
        self._arrays: dict[StoredTensor, NDArray[Any]] = {}
        self._values_left = self._bytes_left = 4 * num_bytes + _MAX_SHARED

    def filled(self, value: Any, depth: int) -> Any:
        """Returns the value with arrays."""
        if depth > 32:
            raise TorchFileError("its lists are nested more than 32 deep: refused")
        self._values_left -= 1
        if self._values_left < 0:
            raise TorchFileError("its lists refer to each other too often: refused")
        if isinstance(value, StoredTensor):
            if value not in self._arrays:
                self._arrays[value] = self._array(value)
            return self._arrays[value]
        if isinstance(value, dict):
            return {key: self.filled(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self.filled(item, depth + 1) for item in value])
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TorchFileError(
            f"it contains only a {type(value).__name__}, not a dict or a list: refused"
        )

    def _array(self, tensor: StoredTensor) -> NDArray[Any]:
        if tensor.storage == BFLOAT16:
            raise TorchFileError(
                f"it contains a tensor of {BFLOAT16}, which is not a type for counts"
            )
        array = self._read(tensor)
        self._bytes_left -= array.nbytes
        if self._bytes_left < 0:
            raise TorchFileError("its tensors share storage too often: refused")
        return array
