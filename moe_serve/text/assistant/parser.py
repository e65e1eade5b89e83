"""The protocol that every assistant parser follows, the plain one, and the ground of the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from moe_serve.text.assistant.delta import NOTHING, AssistantDelta
from moe_serve.text.assistant.outbox import Outbox
from moe_serve.text.assistant.reader import Reader, Reading


class AssistantParser(Protocol):
    """Reads one message. However the text is cut into pieces, the deltas add up to the same."""

    def push(self, text: str) -> AssistantDelta:
        """What is certain after this text; the rest is held back."""
        ...

    def finish(self) -> AssistantDelta:
        """What was held back, when no text follows."""
        ...

    @property
    def has_spoilt_call(self) -> bool:
        """Whether something began as a call does, and was none: it is content."""
        ...


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> AssistantDelta:
        return AssistantDelta(content=text) if text else NOTHING

    def finish(self) -> AssistantDelta:
        return NOTHING

    @property
    def has_spoilt_call(self) -> bool:
        return False


class ReadingParser(ABC):
    """A parser whose `_read` is written as if all text were there (see `Reader`).

    `_read` reads to the end of all text.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._reader = Reader()
        self._out = outbox
        self._reading = self._read()

    def push(self, text: str) -> AssistantDelta:
        self._reader.feed(text)
        next(self._reading, None)
        return self._out.take()

    def finish(self) -> AssistantDelta:
        self._reader.close()
        next(self._reading, None)
        self._out.flush()
        return self._out.take()

    @property
    def has_spoilt_call(self) -> bool:
        return self._out.has_spoilt_call

    @abstractmethod
    def _read(self) -> Reading: ...
