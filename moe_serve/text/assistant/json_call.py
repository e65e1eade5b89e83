"""Parses a call written as a JSON object: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

from collections.abc import Generator

from moe_serve.text.assistant.outbox import Outbox
from moe_serve.text.assistant.reader import Reader, Sink, decoded_string, ignore

_ARGUMENTS = frozenset({"arguments", "parameters"})


class JsonCall:
    """Reads one call. It begins in the outbox as soon as its name is known."""

    def __init__(self, reader: Reader, outbox: Outbox) -> None:
        self._reader = reader
        self._out = outbox
        self._held: list[str] = []  # arguments that came before the name
        self._has_arguments = False
        self.has_begun = False

    def read(self) -> Generator[None, None, bool]:
        """Read a call; returns whether it was one, complete or not. If not, nothing was put out."""
        reader = self._reader
        if (yield from reader.literal("{")):
            is_open = True
            while is_open:
                is_open = (yield from self._member()) and (yield from self._comma())
        if self.has_begun:
            self._out.end_call(is_cut=reader.is_cut)
        return self.has_begun

    def _comma(self) -> Generator[None, None, bool]:
        yield from self._reader.spaces()
        if (yield from self._reader.literal(",")):
            return True
        yield from self._reader.literal("}")
        return False

    def _member(self) -> Generator[None, None, bool]:
        """Read one `"key": value`; returns whether it was well formed."""
        reader = self._reader
        yield from reader.spaces()
        key = yield from reader.json_string()
        yield from reader.spaces()
        if key is None or not (yield from reader.literal(":")):
            return False
        yield from reader.spaces()
        if key == "name" and not self.has_begun:
            name = yield from reader.json_string()
            if not name:
                return False
            self._begin(name)
            return True
        if key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            return (yield from self._arguments())
        return (yield from reader.json_value(ignore))

    def _arguments(self) -> Generator[None, None, bool]:
        sink: Sink = self._out.arguments if self.has_begun else self._held.append
        if (yield from self._reader.peek()) != '"':
            return (yield from self._reader.json_value(sink))
        parts: list[str] = []  # some models write the object as text
        is_whole = yield from self._reader.json_value(parts.append)
        text = "".join(parts)
        is_cut = not is_whole and self._reader.is_cut
        decoded = decoded_string(text.rstrip("\\") + '"' if is_cut else text)
        sink(text if decoded is None else decoded)
        return is_whole

    def _begin(self, name: str) -> None:
        self.has_begun = True
        self._out.begin_call(name)
        for part in self._held:
            self._out.arguments(part)
