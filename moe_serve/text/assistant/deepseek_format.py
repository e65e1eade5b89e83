"""Parses calls as DeepSeek V3, R1 and V3.1 write them (the bars and the low line are not ASCII).

V3 and R1, the arguments in a code block:

    <|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>get_weather
    ```json
    {"city": "Oslo"}
    ```<|tool_call_end|><|tool_calls_end|>

V3.1: <|tool_calls_begin|><|tool_call_begin|>get_weather<|tool_sep|>{"city": "Oslo"}...
"""

from __future__ import annotations

from collections.abc import Generator

from moe_serve.text.assistant.outbox import Outbox
from moe_serve.text.assistant.parser import ReadingParser
from moe_serve.text.assistant.reader import Reading


def _marker(words: str) -> str:
    return "<\uff5c" + words.replace("_", "\u2581") + "\uff5c>"


CALLS_BEGIN, CALLS_END = _marker("tool_calls_begin"), _marker("tool_calls_end")
CALL_BEGIN, CALL_END = _marker("tool_call_begin"), _marker("tool_call_end")
SEPARATOR = _marker("tool_sep")


class DeepSeekParser(ReadingParser):
    """Parses calls.

    `has_code_block`: V3's form, not V3.1's. The markers around all calls are layout.
    """

    def __init__(self, outbox: Outbox, *, has_code_block: bool) -> None:
        self._has_code_block = has_code_block
        self._is_within = False  # between the markers around all calls
        super().__init__(outbox)

    def _read(self) -> Reading:
        reader, out = self._reader, self._out
        markers = (CALLS_BEGIN, CALL_BEGIN, CALLS_END)
        while marker := (yield from reader.until(markers, out.content, self._expects_marker)):
            if marker != CALL_BEGIN:
                self._is_within = marker == CALLS_BEGIN
                continue
            reader.start_record(CALL_BEGIN)
            is_call = yield from (self._block() if self._has_code_block else self._bare())
            text = reader.stop_record()
            self._end_markup(text, is_call=is_call)

    def _expects_marker(self) -> bool:
        return self._is_within or self._is_after_call()

    def _block(self) -> Generator[None, None, bool]:
        reader = self._reader
        yield from reader.word()  # "function"
        if not (yield from reader.literal(SEPARATOR)):
            return False
        name = yield from reader.word()
        yield from reader.spaces()
        if not name or not (yield from reader.literal("```")):
            return False
        yield from reader.word()  # "json"
        yield from self._arguments(name)
        yield from reader.spaces()
        yield from reader.literal("```")
        yield from reader.spaces()
        yield from reader.literal(CALL_END)
        return True

    def _bare(self) -> Generator[None, None, bool]:
        name = yield from self._reader.word()
        if not name or not (yield from self._reader.literal(SEPARATOR)):
            return False
        yield from self._arguments(name)
        yield from self._reader.spaces()
        yield from self._reader.literal(CALL_END)
        return True

    def _arguments(self, name: str) -> Reading:
        self._out.begin_call(name)
        yield from self._reader.spaces()
        yield from self._reader.json_value(self._out.arguments)
        self._out.end_call(is_cut=self._reader.is_cut)
