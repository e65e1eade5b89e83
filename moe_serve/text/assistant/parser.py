"""The protocol of all assistant parsers, the plain parser, and the base of the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from moe_serve.text.assistant.outbox import NOTHING, AssistantDelta, HeldSpace, Outbox, joined
from moe_serve.text.assistant.reader import Reader, Reading


class AssistantParser(Protocol):
    """Reads one message. However the text is cut into pieces, the deltas add up to the same."""

    def push(self, text: str) -> AssistantDelta:
        """Returns what is certain after this text; the rest is held back."""
        ...

    def finish(self, *, is_cut: bool = False) -> AssistantDelta:
        """Returns the held text when no text follows.

        `is_cut`: the model would have continued, so text that began as a call is part of a call and
        not content.
        """
        ...

    @property
    def has_spoilt_call(self) -> bool:
        """True if text that began like a call was not one; it is content unless it was cut."""
        ...

    @property
    def has_cut_call(self) -> bool:
        """True if the text was cut within a call, so that its arguments are incomplete."""
        ...


class PlainParser:
    """Treats all text as content."""

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
        """Ends a call and the markup around it.

        If it was not a call, `text` is content. If the text was cut inside, its meaning is unknown,
        and the rest of it is treated as markup too.
        """
        if self._reader.is_cut:
            self._reader.skip()
            if not is_call:
                self._out.cut_head()
        elif not is_call:
            self._out.spoilt_call(text)

    def _is_after_call(self) -> bool:
        """Returns whether only a further call can follow."""
        return self._out.is_after_call

    @abstractmethod
    def _read(self) -> Reading: ...


class ThinkingParser(ReadingParser):
    """Separates the reasoning from the rest, which `answer` reads.

    `is_open`: the reasoning has begun already, because the prompt ends with the opening marker (or
    the model never writes it). Line breaks next to the markers are layout and are dropped
    (`keeps_space`: except those after the closing one). Without a closing marker all text is
    reasoning.
    """

    def __init__(
        self,
        answer: AssistantParser,
        opening: str,
        closing: str,
        *,
        is_open: bool,
        keeps_space: bool = False,
    ) -> None:
        self._answer = answer
        self._opening = opening
        self._closing = closing
        self._is_open = is_open
        self._keeps_space = keeps_space
        self._answered = AssistantDelta()
        super().__init__(Outbox())

    def push(self, text: str) -> AssistantDelta:
        return joined(super().push(text), self._take_answer())

    def finish(self, *, is_cut: bool = False) -> AssistantDelta:
        thought = joined(super().finish(is_cut=is_cut), self._take_answer())
        return joined(thought, self._answer.finish(is_cut=is_cut))

    @property
    def has_spoilt_call(self) -> bool:
        return self._answer.has_spoilt_call

    @property
    def has_cut_call(self) -> bool:
        return self._answer.has_cut_call

    def _read(self) -> Reading:
        reader = self._reader
        spaces: list[str] = []
        yield from reader.spaces(spaces.append)
        if (yield from reader.literal(self._opening)) or self._is_open:
            yield from reader.spaces()
            thought = HeldSpace(self._out.reasoning)
            yield from reader.until((self._closing,), thought.push)
            thought.drop()
            if not self._keeps_space:
                yield from reader.spaces()
        else:
            self._pass_on("".join(spaces))
        while text := (yield from reader.rest()):
            self._pass_on(text)

    def _pass_on(self, text: str) -> None:
        if text:
            self._answered = joined(self._answered, self._answer.push(text))

    def _take_answer(self) -> AssistantDelta:
        answered, self._answered = self._answered, AssistantDelta()
        return answered
