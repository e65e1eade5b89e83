"""Parses reasoning between two markers in front of the answer: <think> ... </think>."""

from __future__ import annotations

from moe_serve.text.assistant.delta import AssistantDelta, joined
from moe_serve.text.assistant.outbox import HeldSpace, Outbox
from moe_serve.text.assistant.parser import AssistantParser, ReadingParser
from moe_serve.text.assistant.reader import Reading


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
