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

    def finish(self, *, is_cut: bool = False) -> AssistantDelta:
        """What was held back, when no text follows. `is_cut`: the model would have gone on, so
        what began as a call is a part of one and no content."""
        ...

    @property
    def has_spoilt_call(self) -> bool:
        """Whether something began as a call does, and was none: it is content, unless cut off."""
        ...

    @property
    def has_cut_call(self) -> bool:
        """Whether the text was cut within a call: its arguments are not whole."""
        ...


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> AssistantDelta:
        return AssistantDelta(content=text) if text else NOTHING

    def finish(self, *, is_cut: bool = False) -> AssistantDelta:
        return NOTHING

    @property
    def has_spoilt_call(self) -> bool:
        return False

    @property
    def has_cut_call(self) -> bool:
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

    def finish(self, *, is_cut: bool = False) -> AssistantDelta:
        self._reader.close(is_cut=is_cut)
        next(self._reading, None)
        self._out.flush()
        return self._out.take()

    @property
    def has_spoilt_call(self) -> bool:
        return self._out.has_spoilt_call

    @property
    def has_cut_call(self) -> bool:
        return self._out.has_cut_call

    def _end_markup(self, text: str, *, is_call: bool) -> None:
        """After a call and the markup around it. If it was none, `text` is content; where the text
        was cut within, nobody knows what it would have been, and the rest of it is markup too."""
        if self._reader.is_cut:
            self._reader.skip()
            if not is_call:
                self._out.cut_head()
        elif not is_call:
            self._out.spoilt_call(text)

    def _is_after_call(self) -> bool:
        """Only a further call is expected."""
        return self._out.is_after_call

    @abstractmethod
    def _read(self) -> Reading: ...
