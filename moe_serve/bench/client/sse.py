"""Parses server-sent events from bytes that arrive in arbitrary pieces."""

from __future__ import annotations

from moe_serve.errors import BenchStreamError

MAX_EVENT_BYTES = 16 * 2**20


class SseParser:
    """Takes bytes from a socket and returns the data of the events that they complete.

    Lines end with LF, CRLF or CR, and pieces may be cut anywhere. Comments and fields other than
    `data` are dropped; several data lines are joined by LF.
    """

    def __init__(self) -> None:
        self._rest = bytearray()  # the line that has no end yet
        self._lines: list[bytes] = []  # the data of the event that has no end yet
        self._size = 0
        self._has_cr = False  # the last piece ended with CR: a LF now belongs to it
        self._is_first = True

    def feed(self, piece: bytes) -> list[bytes]:
        if self._has_cr and piece:
            self._has_cr = False
            piece = piece.removeprefix(b"\n")
        if b"\r" in piece:
            self._has_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self._rest += piece
        if len(self._rest) + self._size > MAX_EVENT_BYTES:
            raise BenchStreamError(f"an event is larger than {MAX_EVENT_BYTES} bytes")
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        return [event for line in lines if (event := self._line(bytes(line))) is not None]

    def finish(self) -> list[bytes]:
        """Ends the body; some servers omit the empty line after the last event."""
        events = [self._line(bytes(self._rest)), self._line(b"")]
        self._rest.clear()
        return [event for event in events if event is not None]

    def _line(self, line: bytes) -> bytes | None:
        if self._is_first:
            self._is_first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            return self._take()
        name, _, value = line.partition(b":")
        if name == b"data":
            self._lines.append(value.removeprefix(b" "))
            self._size += len(value)
        return None

    def _take(self) -> bytes | None:
        if not self._lines:
            return None
        event = b"\n".join(self._lines)
        self._lines, self._size = [], 0
        return event
