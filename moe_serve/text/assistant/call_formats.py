"""Parses calls that stand between <tool_call> tags, as these models write them:

    Hermes and Qwen3   {"name": "get_weather", "arguments": {"city": "Oslo"}}

    Qwen3-Coder        <function=get_weather>
                       <parameter=city>
                       Oslo
                       </parameter>
                       </function>

    GLM-4.5 and later  get_weather
                       <arg_key>city</arg_key>
                       <arg_value>Oslo</arg_value>

Qwen3-Coder sometimes leaves <tool_call> out, so <function= opens a call as well.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping

from moe_serve.text.assistant.json_call import JsonCall
from moe_serve.text.assistant.outbox import Outbox
from moe_serve.text.assistant.parser import ReadingParser
from moe_serve.text.assistant.reader import Reading
from moe_serve.text.assistant.tool import Tool, TypedArguments

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


class TagParser(ReadingParser):
    """The base of the parsers: finds the tags, and reads each call by `_call`."""

    def _read(self) -> Reading:
        reader, out = self._reader, self._out
        while (yield from reader.until((OPEN,), out.content, self._is_after_call)):
            reader.start_record(OPEN)
            yield from reader.spaces()
            is_call = yield from self._call()
            text = reader.stop_record()
            self._end_markup(text, is_call=is_call)

    @abstractmethod
    def _call(self) -> Generator[None, None, bool]:
        """Read one call and its closing tag; returns whether it was one, complete or not."""


class HermesParser(TagParser):
    def _call(self) -> Generator[None, None, bool]:
        is_call = yield from JsonCall(self._reader, self._out).read()
        if is_call:
            yield from self._reader.spaces()
            yield from self._reader.literal(CLOSE)
        return is_call


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


class GlmParser(TagParser):
    def __init__(self, outbox: Outbox, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        super().__init__(outbox)

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
