"""Reads the pickles inside torch files; it can make plain data and nothing else.

It interprets the opcodes itself, without any import, call or attribute access. A name in the file
stays a name; only the few that mean "a tensor" or "an ordered dict" are understood. Anything else
is refused, and the error names it.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from routing_predictor.traces.routing_error import TorchFileError

_MAX_BYTES = 2**28
_MAX_COUNT = 2**40  # limit on a tensor's sizes
_MAX_DIMENSIONS = 8
_MAX_SHOWN = 100  # characters of a name in a message


@dataclass(frozen=True, slots=True)
class Name:
    """A global of a pickle: two words that are never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        whole = f"{self.module[:_MAX_SHOWN]}.{self.name[:_MAX_SHOWN]}"
        return "".join(letter if letter.isprintable() else "?" for letter in whole)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the pickle describes it; its numbers are elsewhere in the file."""

    storage: str  # the torch name of its type, such as IntStorage
    key: str
    num_stored: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Storage:
    kind: Name
    key: str
    num_stored: int


class _Mark:
    """Marks the start of a list, tuple or dict on the stack."""


_MARK = _Mark()
_REBUILD = Name("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = Name("torch._utils", "_rebuild_parameter")
_ORDERED = Name("collections", "OrderedDict")
_SIZE = Name("torch", "Size")
_VALUES = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE",
     "SHORT_BINUNICODE", "BINUNICODE8", "INT", "LONG", "FLOAT", "UNICODE"}
)  # fmt: skip
_NOTHING = frozenset({"PROTO", "FRAME"})
_EMPTY: Mapping[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_plain_data(content: bytes) -> Any:
    """Returns the data as dicts, lists, tuples, numbers, text, None and `StoredTensor`. Raises
    TorchFileError."""
    if len(content) > _MAX_BYTES:
        raise TorchFileError(f"its pickle has {len(content)} bytes; at most {_MAX_BYTES} are read")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the parser about unusual spellings of texts
        return _walk(content)


def _walk(content: bytes) -> Any:
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return machine.result()
            machine.step(opcode.name, argument)
    except (ValueError, LookupError, UnicodeError) as error:
        if isinstance(error, TorchFileError):
            raise
        raise TorchFileError(f"its pickle is damaged ({error})") from None
    raise TorchFileError("its pickle has no end")


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        if len(self._stack) != 1:
            raise TorchFileError(
                f"its pickle must end with one value, but ends with {len(self._stack)}"
            )
        return self._stack[0]

    def step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _NOTHING:
            return
        if name in _VALUES:
            stack.append(argument)
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            if len(stack) < count:
                raise TorchFileError("its pickle is damaged (a tuple of too few)")
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        else:
            self._build(name, argument)

    def _build(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in ("LIST", "DICT"):
            items = self._marked()
            stack.append(items if name == "LIST" else _put_all({}, items))
        elif name == "APPEND":
            value = stack.pop()
            self._top(list).append(value)
        elif name == "APPENDS":
            items = self._marked()
            self._top(list).extend(items)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _put_all(self._top(dict), [key, value])
        elif name == "SETITEMS":
            items = self._marked()
            _put_all(self._top(dict), items)
        elif name == "GLOBAL":
            module, _, word = argument.partition(" ")
            stack.append(_known(Name(module, word)))
        elif name == "STACK_GLOBAL":
            word, module = stack.pop(), stack.pop()
            if not isinstance(module, str) or not isinstance(word, str):
                raise TorchFileError("its pickle is damaged (a name that is not text)")
            stack.append(_known(Name(module, word)))
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments, what = stack.pop(), stack.pop()
            stack.append(_made(what, arguments))
        else:
            raise TorchFileError(f"its pickle uses {name}, which plain data does not need: refused")

    def _marked(self) -> list[Any]:
        """Pops and returns the values pushed since the last mark."""
        place = len(self._stack) - 1
        while place >= 0 and self._stack[place] is not _MARK:
            place -= 1
        if place < 0:
            raise TorchFileError("its pickle is damaged (no mark)")
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items

    def _top(self, kind: type) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise TorchFileError(f"its pickle is damaged (no {kind.__name__} to add to)")
        return self._stack[-1]


def _known(name: Name) -> Name:
    is_storage = name.module in ("torch", "torch.storage") and name.name.endswith("Storage")
    if name in (_REBUILD, _PARAMETER, _ORDERED, _SIZE) or is_storage:
        return name
    raise TorchFileError(f"it names {name}, which is not plain data: refused, nothing was run")


def _storage(reference: Any) -> _Storage:
    if not (
        isinstance(reference, tuple)
        and len(reference) == 5
        and reference[0] == "storage"
        and isinstance(reference[1], Name)
        and isinstance(reference[2], str)
        and _is_count(reference[4])
    ):
        raise TorchFileError(
            "it refers to something outside the file other than a tensor's storage: refused"
        )
    return _Storage(reference[1], reference[2], reference[4])


def _made(what: Any, arguments: Any) -> Any:
    """Returns the value of a REDUCE."""
    if not isinstance(what, Name) or not isinstance(arguments, tuple):
        raise TorchFileError("its pickle calls something that is not a name: refused")
    if what == _ORDERED and not arguments:
        return {}
    if what == _SIZE and len(arguments) == 1 and isinstance(arguments[0], tuple):
        return arguments[0]
    if what == _PARAMETER and len(arguments) == 3 and isinstance(arguments[0], StoredTensor):
        return arguments[0]
    if what != _REBUILD or len(arguments) not in (6, 7):
        raise TorchFileError(
            f"it calls {what} with {len(arguments)} values: refused, it was not run"
        )
    storage, offset, shape, strides = arguments[:4]
    is_sound = (
        isinstance(storage, _Storage)
        and _is_count(offset)
        and _are_counts(shape)
        and _are_counts(strides)
        and len(shape) == len(strides) <= _MAX_DIMENSIONS
    )
    if not is_sound:
        raise TorchFileError("it describes a tensor that cannot be one: refused")
    return StoredTensor(storage.kind.name, storage.key, storage.num_stored, offset, shape, strides)


def _put_all(target: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise TorchFileError("its pickle is damaged (a key without a value)")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int):
            raise TorchFileError(f"a key of a dict is {type(key).__name__}: refused")
        target[key] = value
    return target


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(_is_count(value) for value in values)
