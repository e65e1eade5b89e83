"""Reads the tensors of a file that torch.save wrote, without running any of its code.

Such a file is a zip with a pickle, `data.pkl`, and the bytes of each storage. A pickle is a program
for a small machine, which may call any function. This machine knows those instructions that a
dictionary of tensors needs, and has no calls: of a tensor it keeps the storage's number, the place,
the shape and the strides. Any other instruction or name is refused.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_serve.errors import CheckpointError
from moe_serve.regular_file import regular_file

_MAX_PROGRAM_BYTES = 16 * 2**20
_DTYPES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_NAMES = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_parameter",
        *(f"torch {name}" for name in _DTYPES),
    }
)


@dataclass(frozen=True, slots=True)
class _Name:
    """A name that the program mentions; never looked up."""

    text: str


@dataclass(frozen=True, slots=True)
class _ZipStorage:
    key: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ZippedTensor:
    """A tensor of the file."""

    storage: _ZipStorage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TorchZip:
    """An open file with a dictionary of tensors. Raises CheckpointError for anything else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(regular_file(path))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
        except (zipfile.BadZipFile, NotImplementedError):
            raise CheckpointError(
                f"{path} is no zip file of torch.save: files of torch before 1.6 are not read."
            ) from None
        programs = [name for name in self._zip.namelist() if name.endswith("/data.pkl")]
        if len(programs) != 1:
            raise CheckpointError(f"{path} has no data.pkl, which files of torch.save have.")
        self._root = programs[0].removesuffix("data.pkl")
        result = _Program(path, self._bytes(programs[0], _MAX_PROGRAM_BYTES)).result()
        self.tensors: Mapping[str, ZippedTensor] = _checked(path, result)

    def read(self, name: str) -> Tensor:
        """Reads a tensor into its own memory."""
        found = self.tensors[name]
        entry = f"{self._root}data/{found.storage.key}"
        try:
            raw = bytearray(self._bytes(entry, None))
            values = torch.frombuffer(raw, dtype=found.storage.dtype)
        except (KeyError, ValueError):
            raise self._error(f"tensor {name[:200]} has no bytes") from None
        pairs = zip(found.shape, found.strides, strict=True)
        end = found.offset + sum((size - 1) * stride for size, stride in pairs) + 1
        if 0 in found.shape or min((0, found.offset, *found.strides)) < 0 or end > len(values):
            raise self._error(f"tensor {name[:200]} lies outside its storage")
        return values.as_strided(found.shape, found.strides, found.offset).contiguous().clone()

    def close(self) -> None:
        self._zip.close()

    def _bytes(self, entry: str, most: int | None) -> bytes:
        info = self._zip.getinfo(entry)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > self._path.stat().st_size:
            raise self._error(f"{entry[:200]} is compressed, which torch.save never does")
        if most is not None and info.file_size > most:
            raise self._error(f"{entry[:200]} is larger than {most} bytes")
        try:
            return self._zip.read(info)
        except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError):
            raise self._error(f"{entry[:200]} cannot be read") from None

    def _error(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {why}.")


def _checked(path: Path, result: object) -> Mapping[str, ZippedTensor]:
    if not isinstance(result, dict) or not result:
        raise CheckpointError(f"{path} has no dictionary of tensors.")
    for name, value in result.items():
        if not isinstance(name, str) or not isinstance(value, ZippedTensor):
            raise CheckpointError(
                f"{path}: the entry {str(name)[:100]!r} is no tensor, and only tensors are read."
            )
    return result


_MARK = object()  # on the stack, where a tuple or the items of a dictionary begin


class _Program:
    """Runs the instructions of a dictionary of tensors."""

    def __init__(self, path: Path, code: bytes) -> None:
        self._path, self._code, self._at = path, code, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> object:
        """Returns the value that the program ends with."""
        try:
            while True:
                op = self._take(1)
                if op == b".":
                    return self._stack.pop()
                handler = _HANDLERS.get(op)
                if handler is None:
                    raise self._refusal(f"the instruction {op!r}")
                handler(self)
        except (IndexError, KeyError, ValueError, TypeError, struct.error, UnicodeDecodeError):
            raise CheckpointError(f"{self._path}: data.pkl is damaged.") from None

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: data.pkl has {what}, which a dictionary of tensors does not need: it "
            "is refused, as pickles can run code."
        )

    def _take(self, count: int) -> bytes:
        part = self._code[self._at : self._at + count]
        if len(part) != count:
            raise ValueError("the program ends early")
        self._at += count
        return part

    def _number(self, form: str) -> int:
        (value,) = struct.unpack(f"<{form}", self._take(struct.calcsize(form)))
        return int(value)

    def _line(self) -> str:
        end = self._code.index(b"\n", self._at)
        return (self._take(end - self._at) + self._take(1))[:-1].decode()

    def push(self, value: object) -> None:
        self._stack.append(value)

    def skip(self, count: int) -> None:
        self._take(count)

    def push_number(self, form: str) -> None:
        self.push(self._number(form))

    def push_long(self) -> None:
        self.push(int.from_bytes(self._take(self._number("B")), "little", signed=True))

    def push_text(self) -> None:
        self.push(self._take(self._number("I")).decode())

    def put(self, form: str) -> None:
        self._memo[self._number(form)] = self._stack[-1]

    def get(self, form: str) -> None:
        self.push(self._memo[self._number(form)])

    def push_name(self) -> None:
        text = f"{self._line()} {self._line()}"
        if text not in _NAMES:
            raise self._refusal(f"the name {text[:100]!r}")
        self.push(_Name(text))

    def _since_mark(self) -> list[Any]:
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:  # an IndexError if there is none
            place -= 1
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items

    def push_tuple(self, count: int | None) -> None:
        if count is None:
            items = self._since_mark()
        else:
            items = self._stack[len(self._stack) - count :]
            del self._stack[len(self._stack) - count :]
        self.push(tuple(items))

    def set_items(self, *, is_one: bool) -> None:
        items = [self._stack.pop(-2), self._stack.pop()] if is_one else self._since_mark()
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise TypeError("items of no dictionary")
        target.update(zip(items[0::2], items[1::2], strict=True))

    def storage(self) -> None:
        tag, kind, key, _location, _size = self._stack.pop()
        if tag != "storage" or not isinstance(kind, _Name) or not str(key).isdecimal():
            raise self._refusal("a reference that is no storage")
        self.push(_ZipStorage(str(key), _DTYPES[kind.text.removeprefix("torch ")]))

    def call(self) -> None:
        """Replaces a name and its arguments by the description of a tensor, or a dictionary."""
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, _Name):
            raise self._refusal("a call of no name")
        if name.text == "collections OrderedDict":
            self.push({})
        elif name.text == "torch._utils _rebuild_parameter":
            self.push(arguments[0])
        elif name.text == "torch._utils _rebuild_tensor_v2":
            storage, offset, shape, strides = arguments[:4]
            if not isinstance(storage, _ZipStorage) or len(shape) != len(strides):
                raise self._refusal("a tensor without a storage")
            self.push(ZippedTensor(storage, int(offset), tuple(shape), tuple(strides)))
        else:
            raise self._refusal(f"a call of {name.text!r}")


_HANDLERS: Mapping[bytes, Callable[[_Program], None]] = {
    b"\x80": lambda p: p.skip(1),  # the version
    b"}": lambda p: p.push({}),
    b"(": lambda p: p.push(_MARK),
    b")": lambda p: p.push(()),
    b"N": lambda p: p.push(None),
    b"\x88": lambda p: p.push(True),
    b"\x89": lambda p: p.push(False),
    b"K": lambda p: p.push_number("B"),
    b"M": lambda p: p.push_number("H"),
    b"J": lambda p: p.push_number("i"),
    b"\x8a": _Program.push_long,
    b"X": _Program.push_text,
    b"q": lambda p: p.put("B"),
    b"r": lambda p: p.put("I"),
    b"h": lambda p: p.get("B"),
    b"j": lambda p: p.get("I"),
    b"c": _Program.push_name,
    b"t": lambda p: p.push_tuple(None),
    b"\x85": lambda p: p.push_tuple(1),
    b"\x86": lambda p: p.push_tuple(2),
    b"\x87": lambda p: p.push_tuple(3),
    b"s": lambda p: p.set_items(is_one=True),
    b"u": lambda p: p.set_items(is_one=False),
    b"Q": _Program.storage,
    b"R": _Program.call,
}
