"""The strings beside the tensors of our safetensors files: the format of the file, and its facts.

format   "moe-serve routing trace" or "moe-serve expert load" version  of that format facts    one
JSON object with everything else
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from routing_predictor.traces.routing_error import TraceError

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The content of a file whose format and version have been checked."""

    path: Path
    tensors: Tensors
    facts: Mapping[str, Any]

    def fact(self, name: str, kind: type) -> Any:
        """Returns a fact of this type (an int must not be negative). Raises TraceError."""
        value = self.facts.get(name)
        is_wrong = not isinstance(value, kind) or isinstance(value, bool)
        if is_wrong or (isinstance(value, int) and value < 0):
            raise TraceError(f"{self.path}: {name} must be {_WORDS[kind]}, got {value!r}")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        values = self.fact(name, list)
        if not all(isinstance(value, str) for value in values):
            raise TraceError(f"{self.path}: {name} holds something that is not text")
        return tuple(values)

    def tensor(self, name: str, kinds: str, num_dimensions: int) -> NDArray[Any]:
        """Returns a tensor whose dtype is of these kinds (numpy's letters). Raises TraceError."""
        array = self.tensors.get(name)
        if array is None:
            raise TraceError(f"{self.path}: the tensor {name} is missing")
        if array.dtype.kind not in kinds or array.ndim != num_dimensions:
            raise TraceError(
                f"{self.path}: the tensor {name} has an invalid dtype or shape, "
                f"{array.dtype} {array.shape}"
            )
        return array


_MOST_DIGITS = 1000
_WORDS: Mapping[type, str] = {int: "a count", str: "text", list: "a list"}


def write_tensors(
    path: Path, tensors: Tensors, facts: Mapping[str, Any], format_name: str, version: int
) -> int:
    """Writes a file completely or not at all; returns its bytes. Raises TraceError."""
    metadata = {"format": format_name, "version": str(version), "facts": json.dumps(facts)}
    whole = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    content = save(whole, metadata)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # without a folder there is nothing to remove
            aside.unlink(missing_ok=True)
        raise TraceError(f"{path} cannot be written: {error.strerror}") from None
    return len(content)


def read_metadata(path: Path) -> Mapping[str, str]:
    """Returns the strings of any safetensors file. Raises TraceError."""
    try:
        with safe_open(regular(path), framework="numpy") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise unreadable(path, error) from None


def read_tensors(path: Path, format_name: str, version: int) -> TensorFile:
    """Reads a file. Raises TraceError if it is not of this format and version."""
    metadata = read_metadata(path)
    if metadata.get("format") != format_name:
        found = metadata.get("format", "a safetensors file without a format")
        raise TraceError(f"{path} is not a {format_name}, but {found}")
    if metadata.get("version") != str(version):
        number = metadata.get("version")
        raise TraceError(
            f"{path} has version {number} of its format, but only version {version} can be read"
        )
    try:
        facts = json.loads(metadata.get("facts", ""), parse_int=whole_number)
        with safe_open(regular(path), framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (ValueError, RecursionError):
        raise TraceError(f"{path}: its metadata is not JSON") from None
    except (OSError, SafetensorError, TypeError) as error:
        raise unreadable(path, error) from None
    if not isinstance(facts, dict):
        raise TraceError(f"{path}: its metadata is not a JSON object")
    return TensorFile(path, tensors, facts)


def whole_number(text: str) -> int:
    """Parses a whole number of JSON; refuses thousands of digits, which cannot be multiplied and
    printed."""
    if len(text) > _MOST_DIGITS:
        raise TraceError(f"has a number of {len(text)} digits; at most {_MOST_DIGITS} are allowed")
    return int(text)


def regular(path: Path) -> Path:
    """Returns the path. Raises OSError if opening it would wait for a writer or never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a FIFO, a socket or a device", str(path))
    return path


def unreadable(path: Path, error: Exception) -> TraceError:
    if isinstance(error, FileNotFoundError):
        return TraceError(f"{path} does not exist")
    if path.is_dir():
        return TraceError(f"{path} is a folder, not a file")
    why = getattr(error, "strerror", None) or " ".join(str(error).split())
    return TraceError(f"{path} cannot be read as a safetensors file: {why}")
