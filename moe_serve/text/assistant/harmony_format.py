"""Parses messages as gpt-oss writes them, in the harmony format: reasoning, calls and content in
one.

    <|channel|>analysis<|message|>The user wants ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json
    <|message|>{"city": "Oslo"}<|call|>

The channel `analysis` is reasoning; a message to a function is a call; everything else is content.
The markers are special tokens, and the prompt ends with the first <|start|>assistant.
"""

from __future__ import annotations

from collections.abc import Generator

from moe_serve.text.assistant.outbox import Outbox
from moe_serve.text.assistant.parser import ReadingParser
from moe_serve.text.assistant.reader import Condition, Reading, Sink, always, never

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE, END, CALL, RETURN = "<|message|>", "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
BODY_ENDS = (END, START, CHANNEL, CALL, RETURN)
_FUNCTIONS = "functions."


class HarmonyParser(ReadingParser):
    """Parses harmony messages.

    `has_tools` False: messages to functions are content. `has_reasoning` False: so is analysis.
    Text outside of any message is content, and so is a head that no message follows.
    """

    def __init__(self, outbox: Outbox, *, has_tools: bool, has_reasoning: bool) -> None:
        self._has_tools = has_tools
        self._has_reasoning = has_reasoning
        super().__init__(outbox)

    def _read(self) -> Reading:
        reader, out = self._reader, self._out
        reader.start_record()
        head = "to=" if (yield from reader.literal(" to=")) else ""
        if head:
            marker = CHANNEL
        else:
            reader.stop_record()
            marker = yield from reader.until(MARKERS, out.content, self._is_after_call)
        while marker:
            if marker not in (START, CHANNEL):
                marker = yield from reader.until(MARKERS, out.content, self._is_after_call)
                continue
            if not head:
                reader.start_record(marker)
            marker, head = (yield from self._message(head)), ""

    def _message(self, head: str) -> Generator[None, None, str]:
        """Reads a head and its message; returns the marker that ended it."""
        reader, parts = self._reader, [head]
        while True:
            marker = yield from reader.until(MARKERS, parts.append, always)
            if marker not in (CHANNEL, CONSTRAIN):
                break
            parts.append(" " + marker + " ")
        record = reader.stop_record()
        words = "".join(parts).split()
        name = next((word[3:] for word in words if word.startswith("to=")), "")
        if marker != MESSAGE:
            is_spoilt = self._has_tools and name.startswith(_FUNCTIONS)
            if not marker and reader.is_cut:
                if is_spoilt:
                    self._out.cut_head()
                return marker
            sink = self._out.spoilt_call if is_spoilt else self._out.content
            sink(record.removesuffix(marker) if marker else record)
            return marker
        if self._has_tools and name.startswith(_FUNCTIONS) and name != _FUNCTIONS:
            self._out.begin_call(name.removeprefix(_FUNCTIONS))
            marker = yield from self._body(self._out.arguments, always)
            self._out.end_call(is_cut=not marker and reader.is_cut)
            return marker
        is_reasoning = self._has_reasoning and "analysis" in words
        return (yield from self._body(self._out.reasoning if is_reasoning else self._out.content))

    def _body(self, sink: Sink, expects_end: Condition = never) -> Generator[None, None, str]:
        return (yield from self._reader.until(BODY_ENDS, sink, expects_end))
