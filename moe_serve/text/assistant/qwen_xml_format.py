"""Parses calls as Qwen3-Coder writes them.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

The model sometimes leaves <tool_call> out, so <function= opens a call as well.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

from moe_serve.text.assistant.outbox import Outbox
from moe_serve.text.assistant.parser import ReadingParser
from moe_serve.text.assistant.reader import Reading
from moe_serve.text.assistant.tool import Tool
from moe_serve.text.assistant.typed_arguments import TypedArguments

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


class QwenXmlParser(ReadingParser):
    def __init__(self, outbox: Outbox, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        super().__init__(outbox)

    def _read(self) -> Reading:
        reader, out, openings = self._reader, self._out, (OPEN, FUNCTION)
        while marker := (yield from reader.until(openings, out.content, self._is_after_call)):
            reader.start_record(marker)
            has_function = marker == FUNCTION
            if not has_function:
                yield from reader.spaces()
                has_function = yield from reader.literal(FUNCTION)
            is_call = has_function and (yield from self._function())
            if is_call:
                yield from reader.spaces()
                yield from reader.literal(CLOSE)
            text = reader.stop_record()
            self._end_markup(text, is_call=is_call)

    def _function(self) -> Generator[None, None, bool]:
        reader = self._reader
        name = yield from reader.word()
        if not name or not (yield from reader.literal(">")):
            return False
        self._out.begin_call(name)
        arguments = TypedArguments(reader, self._out, self._tools.get(name))
        is_whole = True
        yield from reader.spaces()
        while is_whole and (yield from reader.literal(PARAMETER)):
            key: list[str] = []
            is_whole = bool((yield from reader.until((">",), key.append)))
            if is_whole:
                yield from reader.literal("\n")
                ends = ("\n" + END_PARAMETER, END_PARAMETER)
                is_whole = yield from arguments.read("".join(key), ends)
                yield from reader.spaces()
        if is_whole and (yield from reader.literal(END_FUNCTION)):
            arguments.close()
        self._out.end_call(is_cut=reader.is_cut)
        return True
