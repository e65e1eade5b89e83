"""Reads the tensors of a folder of safetensors by name, whichever file holds them.

A file is opened when one of its tensors is first requested. Opening reads headers only, so `expect`
can refuse a bad checkpoint before it takes memory.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

import moe_serve
from moe_serve.errors import CheckpointError
from moe_serve.json_text import parse_json
from moe_serve.model.checkpoint.safetensors_file import SafetensorsFile, TensorHeader
from moe_serve.regular_file import regular_file

FLOAT_DTYPES = ("F32", "F16", "BF16")

Shape = tuple[int, ...]


class Checkpoint:
    """The stored tensors of one folder. Several threads may read at once."""

    def __init__(self, folder: Path, *, is_copying: bool = False) -> None:
        """`is_copying`: read tensors into their own memory each time, so that a disk error becomes
        a CheckpointError. Otherwise tensors are views of the mapped files.
        """
        self.folder, self._is_copying = folder, is_copying
        self._files: dict[str, SafetensorsFile] = {}
        self._lock = threading.Lock()
        indexed = _indexed(folder)
        self._file_of: Mapping[str, str] = self._of_all_files() if indexed is None else indexed

    def copying(self) -> Checkpoint:
        """Returns the same tensors with `is_copying`; headers that were read are not read again."""
        other = copy.copy(self)
        other._is_copying, other._lock = True, threading.Lock()
        with self._lock:
            other._files = {name: file.again() for name, file in self._files.items()}
        return other

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        """Yields the names of all stored tensors."""
        return iter(self._file_of)

    def header(self, name: str) -> TensorHeader:
        """Returns dtype and shape of a stored tensor; CheckpointError if it is missing."""
        return self._file(name).headers[name]

    def path(self, name: str) -> Path:
        """Returns the file of a tensor, for messages."""
        return self.folder / self._file_of[name]

    def expect(
        self,
        name: str,
        shapes: Sequence[Shape],
        dtypes: Iterable[str] = FLOAT_DTYPES,
        implied_by: str = "config.json",
    ) -> TensorHeader:
        """Returns the header if its shape and dtype are among the allowed ones; CheckpointError if
        not.
        """
        header = self.header(name)
        if header.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(
                f"{self.path(name)}: tensor {name} has shape {list(header.shape)}, but "
                f"{implied_by} implies {wanted}."
            )
        if header.dtype not in dtypes:
            raise CheckpointError(
                f"{self.path(name)}: tensor {name} has dtype {header.dtype}; supported "
                f"are {', '.join(dtypes)}."
            )
        return header

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raises CheckpointError unless every tensor exists with its shape and a float dtype."""
        for name, shape in shapes.items():
            self.expect(name, [shape])

    def view(self, name: str, index: int | None = None) -> Tensor:
        """Returns a tensor as it is stored, or one index of its first dimension: memory-mapped, or
        read.
        """
        file = self._file(name)
        return file.copy(name, index) if self._is_copying else file.view(name, index)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Reads one tensor onto the CPU, in `dtype`."""
        return self.view(name).to(dtype)

    def drop(self, name: str, index: int | None = None) -> None:
        """Releases the memory of a tensor's mapped pages; the caller has copied the tensor."""
        if not self._is_copying:
            self._file(name).drop(name, index)

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is missing; {self._neighbours(name)}."
            )
        file_name = self._file_of[name]
        with self._lock:
            file = self._files.get(file_name)
            if file is None:
                file = self._files[file_name] = SafetensorsFile(self.folder / file_name)
        if name not in file.headers:
            raise CheckpointError(
                f"{file.path} does not hold tensor {name}, although the index says so."
            )
        return file

    def _neighbours(self, name: str) -> str:
        module = name.rpartition(".")[0] + "."
        beside = sorted(n for n in self._file_of if n.startswith(module) and module != ".")
        if beside and len(beside) <= 8:
            return f"its module has {', '.join(n.removeprefix(module) for n in beside)}"
        return f"the files hold {len(self._file_of)} tensors"

    def _of_all_files(self) -> dict[str, str]:
        """Builds the map from tensor name to file name from the files themselves."""
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(_no_safetensors(self.folder))
        file_of: dict[str, str] = {}
        for path in paths:
            self._files[path.name] = file = SafetensorsFile(path)
            for name in file.headers:
                if name in file_of:
                    raise CheckpointError(
                        f"{self.folder}: tensor {name} is in {file_of[name]} and in {path.name}: "
                        "remove the file that does not belong."
                    )
                file_of[name] = path.name
        return file_of


def _indexed(folder: Path) -> dict[str, str] | None:
    """Reads the map from tensor name to file name from the sharded index;
    None if there is no index.
    """
    path = folder / "model.safetensors.index.json"
    try:
        file_of = parse_json(regular_file(path).read_text(encoding="utf-8"))["weight_map"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} has no readable weight_map: {error}.") from None
    if not isinstance(file_of, dict):
        raise CheckpointError(f"{path} has no readable weight_map: it is not an object.")
    for file_name in set(map(str, file_of.values())):
        if not _is_file_name(file_name):
            raise CheckpointError(
                f"{path} names {file_name!r}, but a name in it must be a .safetensors file "
                "in the same folder."
            )
    return {name: str(file_name) for name, file_name in file_of.items()}


def _is_file_name(name: str) -> bool:
    """Returns whether `name` is a valid name of a file beside the index."""
    try:
        is_name = b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return is_name and Path(name).name == name and name.endswith(".safetensors")


def _no_safetensors(folder: Path) -> str:
    names = sorted(p.name for p in folder.glob("*"))
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        return (
            f"{folder} holds {pickles[0]} but no .safetensors file: pickled weights can run code "
            "and are never loaded; convert the checkpoint to safetensors."
        )
    other = [name for name in names if name.endswith((".gguf", ".h5", ".msgpack", ".onnx"))]
    if other:
        return f"{folder} holds {other[0]} but no .safetensors file, and only those are read."
    return f"{folder} holds no .safetensors file."


def demo_model_folder() -> Path:
    """Returns the folder of the bundled checkpoint, in Hugging Face layout."""
    return Path(moe_serve.__file__).parent / "demo_model"
