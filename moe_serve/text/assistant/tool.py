"""A tool of a request, and its arguments written as bare text, which become typed JSON."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_serve.text.assistant.outbox import Outbox
from moe_serve.text.assistant.reader import Reader, always

_NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function.

    `parameters` is the JSON schema of its arguments; by default it has no arguments.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NO_ARGUMENTS)

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schema of each argument."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        required = self.parameters.get("required")
        if not isinstance(required, list):
            return frozenset()
        return frozenset(name for name in required if isinstance(name, str))


_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's spellings


class TypedArguments:
    """Writes `{"key": value, ...}` of one call, strings as they arrive and other values when
    complete.
    """

    def __init__(self, reader: Reader, outbox: Outbox, tool: Tool | None) -> None:
        self._reader = reader
        self._out = outbox
        self._properties: Mapping[str, Any] = {} if tool is None else tool.properties
        self._num_arguments = 0

    def read(self, key: str, ends: Sequence[str]) -> Generator[None, None, bool]:
        """Reads the value up to one of the markers; returns whether a marker came."""
        self._out.arguments(("{" if self._num_arguments == 0 else ", ") + _encoded(key) + ": ")
        self._num_arguments += 1
        if is_text(self._properties.get(key)):
            self._out.arguments('"')
            end = yield from self._reader.until(ends, self._put_text, always)
            if end:
                self._out.arguments('"')
            return bool(end)
        parts: list[str] = []
        end = yield from self._reader.until(ends, parts.append, always)
        text = "".join(parts)
        is_cut = not end and self._reader.is_cut  # the complete value is unknown
        self._out.arguments(text.strip() if is_cut else _value(self._properties.get(key), text))
        return bool(end)

    def close(self) -> None:
        if self._num_arguments:
            self._out.arguments("}")

    def _put_text(self, text: str) -> None:
        self._out.arguments(_encoded(text)[1:-1])


def is_text(schema: Any) -> bool:
    """Returns whether a value of this schema is always a string."""
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind == "string"
    options = schema.get("enum")
    return isinstance(options, list) and all(isinstance(option, str) for option in options)


def _value(schema: Any, text: str) -> str:
    """Returns valid JSON unchanged, and other text as a JSON string."""
    stripped = text.strip()
    stripped = _WORDS.get(stripped, stripped)
    try:
        json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _encoded(text)
    return stripped


def _refuse(name: str) -> None:
    raise ValueError(name)


def _encoded(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
