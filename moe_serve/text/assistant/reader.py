"""Reads text that arrives in pieces as if it were all there.

A parser is a generator that reads through these methods (`yield from`), and is suspended at the
current end of the text. Every decision depends on the characters alone, never on the boundaries of
the pieces. While a method waits, only part of a marker stays unread, so the cost is linear.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence

Sink = Callable[[str], object]
Condition = Callable[[], bool]
Reading = Generator[None, None, None]
_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[\w.:/\-]*")
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_SCALAR = re.compile(r"[\w+\-.]*")
_CLOSERS = {"{": "}", "[": "]"}


def ignore(_: str) -> None:
    """Discards text that is read and not needed."""


def always() -> bool:
    return True


def never() -> bool:
    return False


class Reader:
    """The text that has arrived and has not been read."""

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        self._is_closed = False
        self.is_cut = False
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text = self._text[self._pos :] + text
        self._pos = 0

    def close(self, *, is_cut: bool = False) -> None:
        """Ends the text. `is_cut`: a limit or a stop string ended it, not the model."""
        self._is_closed = True
        self.is_cut = is_cut

    def skip(self) -> None:
        """Skips the text that has arrived."""
        self._advance(len(self._text))

    def start_record(self, *read: str) -> None:
        """Starts to record text that is read, beginning with `text`, which was read before."""
        self._record = list(read)

    def stop_record(self) -> str:
        record, self._record = "".join(self._record or ()), None
        return record

    def peek(self) -> Generator[None, None, str]:
        """Returns the next character without reading it; "" at the end of all text."""
        while self._pos == len(self._text):
            if self._is_closed:
                return ""
            yield
        return self._text[self._pos]

    def take(self) -> Generator[None, None, str]:
        """Reads the next character."""
        char = yield from self.peek()
        return self._advance(self._pos + 1) if char else ""

    def rest(self) -> Generator[None, None, str]:
        """Reads all text that has arrived; "" at the end of all text."""
        yield from self.peek()
        return self._advance(len(self._text))

    def spaces(self, sink: Sink = ignore) -> Reading:
        yield from self._run_of(_SPACE, sink)

    def word(self) -> Generator[None, None, str]:
        """Reads the longest run of characters that may be in function names."""
        parts: list[str] = []
        yield from self._run_of(_WORD, parts.append)
        return "".join(parts)

    def literal(self, text: str) -> Generator[None, None, bool]:
        """Reads exactly this text. Returns False, and reads nothing, if other text comes next."""
        while True:
            seen = self._text[self._pos : self._pos + len(text)]
            if seen == text:
                self._advance(self._pos + len(text))
                return True
            if self._is_closed or not text.startswith(seen):
                return False
            yield

    def until(
        self, markers: Sequence[str], sink: Sink, expects_marker: Condition = never
    ) -> Generator[None, None, str]:
        """Passes text to `sink` up to the first marker, and reads the marker; "" if none comes.

        No marker may lie within another one, except at its end. At the end of a cut text, the
        beginning of a marker is left out if `expects_marker`; otherwise it is text.
        """
        while True:
            found = [(self._text.find(m, self._pos), -len(m), m) for m in markers]
            starts = [entry for entry in found if entry[0] >= 0]
            if starts:
                start, _, marker = min(starts)
                self._give(start, sink)
                self._advance(start + len(marker))
                return marker
            is_kept = self._is_closed and not self.is_cut
            num_held = 0 if is_kept else self._num_begun(markers)
            self._give(len(self._text) - num_held, sink)
            if self._is_closed:
                if not expects_marker():
                    self._give(len(self._text), sink)
                self.skip()
                return ""
            yield

    def json_string(self) -> Generator[None, None, str | None]:
        """Reads a JSON string, decoded; None if the text is not one."""
        parts: list[str] = []
        if (yield from self.peek()) != '"' or not (yield from self.json_value(parts.append)):
            return None
        return decoded_string("".join(parts))

    def json_value(self, sink: Sink) -> Generator[None, None, bool]:
        """Passes one JSON value on as it arrives; returns whether it is complete and its brackets
        match.
        """
        char = yield from self.peek()
        if char == '"':
            sink((yield from self.take()))
            return (yield from self._string_end(sink))
        if char not in _CLOSERS:
            return (yield from self._scalar(sink))
        closers: list[str] = []
        while True:
            char = yield from self._up_to(_STRUCTURE, sink)
            if char == "":
                return False
            if char in _CLOSERS:
                closers.append(_CLOSERS[char])
            elif char == '"':
                sink((yield from self.take()))
                if not (yield from self._string_end(sink)):
                    return False
                continue
            elif char != closers.pop():
                return False
            sink((yield from self.take()))
            if not closers:
                return True

    def _scalar(self, sink: Sink) -> Generator[None, None, bool]:
        parts: list[str] = []
        yield from self._run_of(_SCALAR, parts.append)
        text = "".join(parts)
        sink(text)
        return is_json_scalar(text)

    def _string_end(self, sink: Sink) -> Generator[None, None, bool]:
        """Reads the rest of a string whose opening quote has been read."""
        while True:
            char = yield from self._up_to(_STRING_END, sink)
            if char == "":
                return False
            sink((yield from self.take()))
            if char == '"':
                return True
            sink((yield from self.take()))

    def _up_to(self, pattern: re.Pattern[str], sink: Sink) -> Generator[None, None, str]:
        """Passes text on up to a character of `pattern`, which is returned and not read."""
        while True:
            match = pattern.search(self._text, self._pos)
            self._give(len(self._text) if match is None else match.start(), sink)
            if match is not None:
                return match.group()
            if self._is_closed:
                return ""
            yield

    def _run_of(self, pattern: re.Pattern[str], sink: Sink) -> Reading:
        while True:
            match = pattern.match(self._text, self._pos)
            assert match is not None, "the pattern must also match an empty run"
            self._give(match.end(), sink)
            if self._pos < len(self._text) or self._is_closed:
                return
            yield

    def _num_begun(self, markers: Sequence[str]) -> int:
        """Returns how many characters at the text's end may be the beginning of a marker."""
        longest = min(max(map(len, markers)) - 1, len(self._text) - self._pos)
        for count in range(longest, 0, -1):
            tail = self._text[len(self._text) - count :]
            if any(marker.startswith(tail) for marker in markers):
                return count
        return 0

    def _give(self, end: int, sink: Sink) -> None:
        if end > self._pos:
            sink(self._advance(end))

    def _advance(self, end: int) -> str:
        read = self._text[self._pos : end]
        self._pos = end
        if self._record is not None:
            self._record.append(read)
        return read


def decoded_string(text: str) -> str | None:
    """Decodes a JSON string; None if it is invalid.

    Half of a surrogate pair, which cannot be encoded in an answer, becomes U+FFFD.
    """
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    if not isinstance(value, str):
        return None
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def is_json_scalar(text: str) -> bool:
    """Returns whether this is a number, true, false or null; long texts are not examined."""
    if not text or len(text) > 400:
        return False
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(name)
