"""Parses calls as GLM-4.5 and its successors write them.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

from moe_serve.text.assistant.outbox import Outbox
from moe_serve.text.assistant.parser import ReadingParser
from moe_serve.text.assistant.reader import Reading
from moe_serve.text.assistant.tool import Tool
from moe_serve.text.assistant.typed_arguments import TypedArguments

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


class GlmParser(ReadingParser):
    def __init__(self, outbox: Outbox, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        super().__init__(outbox)

    def _read(self) -> Reading:
        reader, out = self._reader, self._out
        while (yield from reader.until((OPEN,), out.content, self._is_after_call)):
            reader.start_record(OPEN)
            yield from reader.spaces()
            is_call = yield from self._call()
            text = reader.stop_record()
            self._end_markup(text, is_call=is_call)

    def _call(self) -> Generator[None, None, bool]:
        reader, out = self._reader, self._out
        name = yield from reader.word()
        yield from reader.spaces()
        if not name:
            return False
        if (yield from reader.literal(CLOSE)):
            out.begin_call(name)
            out.end_call()
            return True
        if not (yield from reader.literal(KEY)):
            return False
        out.begin_call(name)
        arguments = TypedArguments(reader, out, self._tools.get(name))
        has_more = True
        while has_more:
            has_more = (yield from self._argument(arguments)) and (yield from reader.literal(KEY))
        if (yield from reader.literal(CLOSE)):
            arguments.close()
        out.end_call(is_cut=reader.is_cut)
        return True

    def _argument(self, arguments: TypedArguments) -> Generator[None, None, bool]:
        """Read one key and its value; returns whether both were complete."""
        reader, key = self._reader, list[str]()
        if not (yield from reader.until((END_KEY,), key.append)):
            return False
        yield from reader.spaces()
        if not (yield from reader.literal(VALUE)):
            return False
        is_whole = yield from arguments.read("".join(key), (END_VALUE,))
        yield from reader.spaces()
        return is_whole
