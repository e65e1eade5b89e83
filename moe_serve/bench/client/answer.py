"""Reads one answer as its bytes arrive and records when its tokens arrived."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from moe_serve.bench.figures.request_record import EXPIRED, REFUSED, RequestRecord
from moe_serve.errors import BenchStreamError, plain

MAX_EVENT_BYTES = 16 * 2**20
MAX_BODY_BYTES = 64 * 2**20
_SHOWN_BYTES = 300
# Decoding also raises these: invalid UTF-8 and lists a thousand deep are not a DecodeError.
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


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


class _AnswerMessage(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def has_tokens(self) -> bool:
        """True if the event carries tokens; the opening event has a role and no text."""
        texts = (self.content, self.reasoning, self.reasoning_content, self.refusal)
        return any(texts) or bool(self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _AnswerMessage | None = None
    message: _AnswerMessage | None = None

    @property
    def has_tokens(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.has_tokens)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class AnswerReader:
    """Reads one answer: call `head`, then `body` for each piece, then `finish` or `fail`, then
    `record`.

    A token counts from the moment its event was read from the socket, not from the moment a task
    handled it.
    """

    def __init__(self, *, is_stream: bool, on_token: Callable[[], None] | None = None) -> None:
        self.is_done = False  # nothing more is awaited: [DONE], an error, or the end of the body
        self.has_bytes = False
        self.error: str | None = None
        self._detail = ""
        self._status = 0
        self._is_stream = is_stream
        self._on_token = on_token
        self._sse = SseParser()
        self._content = bytearray()  # the body, if it is not a stream
        self._usage: _Usage | None = None
        self._first: float | None = None
        self._last: float | None = None
        self._end: float | None = None
        self._gaps: array[float] = array("d")
        self._counts: list[int | None] = []  # completion_tokens so far, of each event with tokens
        self._has_answer = False
        self._predicted_s: float | None = None

    def predicted(self, header: bytes) -> None:
        """Takes the time to the first token that the server expects, in milliseconds."""
        with contextlib.suppress(ValueError):
            self._predicted_s = float(header) / 1e3

    def head(self, status: int) -> None:
        self._status = status
        self.has_bytes = True

    def body(self, at: float, piece: bytes) -> None:
        """Takes a piece of the body that was read from the socket at time `at`."""
        if self.is_done:
            return
        if self._status != 200 or not self._is_stream:
            self._content += piece
            if len(self._content) > MAX_BODY_BYTES:
                self.fail(at, "broken answer", f"it is larger than {MAX_BODY_BYTES} bytes")
            return
        try:
            self._read_events(at, self._sse.feed(piece))
        except BenchStreamError as error:
            self.fail(at, "broken answer", str(error))

    def finish(self, at: float) -> None:
        """Ends the answer after the body ended as HTTP requires."""
        if self.is_done:
            return
        if self._status != 200:
            kind = _own_code(bytes(self._content)) or f"HTTP {self._status}"
            self.fail(at, kind, _shown(bytes(self._content)))
        elif self._is_stream:
            self._read_events(at, self._sse.finish())
            if not self.is_done:
                self.fail(at, "broken answer", "the stream ended without [DONE]")
        else:
            self._read_whole(at)

    def fail(self, at: float, kind: str, detail: str) -> None:
        if not self.is_done:
            self.error, self._detail = kind, detail
            self._end, self.is_done = at, True

    def record(
        self, *, index: int, scheduled_s: float, started_s: float, wanted_tokens: int
    ) -> RequestRecord:
        assert self.is_done and self._end is not None, "the answer has not ended"
        usage = self._usage or _Usage()
        details = usage.prompt_tokens_details or _Details()
        gap_tokens, first_tokens = self._tokens_by_event()
        return RequestRecord(
            index=index,
            scheduled_s=scheduled_s,
            started_s=started_s,
            end_s=self._end,
            first_s=self._first,
            last_s=self._last,
            gaps_s=self._gaps,
            gap_tokens=gap_tokens,
            first_tokens=first_tokens,
            wanted_tokens=wanted_tokens,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=details.cached_tokens,
            predicted_ttft_s=self._predicted_s,
            error=self.error,
            detail=self._detail,
        )

    def _read_events(self, at: float, events: list[bytes]) -> None:
        for event in events:
            if self.is_done:
                return
            if event == b"[DONE]":
                self._done(at)
                return
            try:
                chunk = msgspec.json.decode(event, type=_Chunk)
            except _NO_JSON as error:
                self.fail(at, "broken answer", f"{error}: {_shown(event)}")
                return
            if chunk.error is not None:
                content = msgspec.json.encode({"error": chunk.error})
                self.fail(at, _own_code(content) or "error in stream", _shown(content))
                return
            self._read_chunk(at, chunk)

    def _read_chunk(self, at: float, chunk: _Chunk) -> None:
        before = self._usage.completion_tokens if self._usage else None
        if chunk.usage is not None:
            self._usage = chunk.usage
        if not chunk.choices:
            return  # the last one, which has the usage and nothing else
        self._has_answer = True
        count = chunk.usage.completion_tokens if chunk.usage else None
        # A parser may hold the text of a token back, and the usage still tells that it was made.
        has_grown = count is not None and count > (before or 0)
        if has_grown or any(choice.has_tokens for choice in chunk.choices):
            self._token(at, count)

    def _token(self, at: float, count: int | None) -> None:
        if self._last is None:
            self._first = at
        else:
            self._gaps.append(at - self._last)
        self._last = at
        self._counts.append(count)
        if self._on_token is not None:
            self._on_token()

    def _done(self, at: float) -> None:
        if not self._has_answer:
            self.fail(at, "broken answer", "the stream had no choices")
            return
        self._end, self.is_done = at, True

    def _read_whole(self, at: float) -> None:
        try:
            answer = msgspec.json.decode(bytes(self._content), type=_Chunk)
        except _NO_JSON as error:
            self.fail(at, "broken answer", f"{error}: {_shown(bytes(self._content))}")
            return
        if answer.error is not None or not answer.choices:
            self.fail(at, "broken answer", f"no choices: {_shown(bytes(self._content))}")
            return
        self._usage = answer.usage
        self._end, self.is_done = at, True

    def _tokens_by_event(self) -> tuple[array[int], int]:
        """Returns (tokens of each gap, tokens of the first event) if every event reported its
        usage."""
        counts = [count for count in self._counts if count is not None]
        if not counts or len(counts) < len(self._counts) or counts != sorted(counts):
            return array("L"), 1
        steps = (after - before for before, after in zip(counts, counts[1:], strict=False))
        return array("L", steps), max(1, counts[0])


def _own_code(content: bytes) -> str | None:
    """Returns the code of an error that is a kind of its own: a missed or unreachable deadline."""
    with contextlib.suppress(*_NO_JSON):
        answer = msgspec.json.decode(content)
        inner = answer.get("error") if isinstance(answer, dict) else None
        code = inner.get("code") if isinstance(inner, dict) else None
        return code if code in (REFUSED, EXPIRED) else None
    return None


def _shown(content: bytes) -> str:
    """Returns the message of an error envelope, or the beginning of the body."""
    with contextlib.suppress(*_NO_JSON):
        answer = msgspec.json.decode(content)
        inner = answer.get("error", answer) if isinstance(answer, dict) else answer
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            return plain(inner["message"])
    return plain(content[:_SHOWN_BYTES].decode("utf-8", "replace"))
