"""Parses calls whose arguments are JSON or stand between tags, as these models write them:

    Hermes and Qwen3   <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>

    Qwen3-Coder        <tool_call><function=get_weather>
                       <parameter=city>
                       Oslo
                       </parameter>
                       </function></tool_call>

    GLM-4.5 and later  <tool_call>get_weather
                       <arg_key>city</arg_key>
                       <arg_value>Oslo</arg_value></tool_call>

    Mistral, older     [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}, ...]
    Mistral, newer     [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]...

Qwen3-Coder sometimes leaves <tool_call> out, so <function= opens a call as well. Newer models of
Mistral may write [CALL_ID]... before [ARGS], or leave [ARGS] out.
"""

from __future__ import annotations

import secrets
import string
from abc import abstractmethod
from collections.abc import Generator, Mapping

from moe_serve.text.assistant.outbox import Outbox
from moe_serve.text.assistant.parser import ReadingParser
from moe_serve.text.assistant.reader import Reader, Reading, Sink, decoded_string, ignore
from moe_serve.text.assistant.tool import Tool, TypedArguments

_ARGUMENTS = frozenset({"arguments", "parameters"})
OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ALPHABET = string.ascii_letters + string.digits


class JsonCall:
    """Reads one call. It begins in the outbox as soon as its name is known."""

    def __init__(self, reader: Reader, outbox: Outbox) -> None:
        self._reader = reader
        self._out = outbox
        self._held: list[str] = []  # arguments that came before the name
        self._has_arguments = False
        self.has_begun = False

    def read(self) -> Generator[None, None, bool]:
        """Reads a call; returns whether it was one, complete or not. If not, nothing was put
        out."""
        reader = self._reader
        if (yield from reader.literal("{")):
            is_open = True
            while is_open:
                is_open = (yield from self._member()) and (yield from self._comma())
        if self.has_begun:
            self._out.end_call(is_cut=reader.is_cut)
        return self.has_begun

    def _comma(self) -> Generator[None, None, bool]:
        yield from self._reader.spaces()
        if (yield from self._reader.literal(",")):
            return True
        yield from self._reader.literal("}")
        return False

    def _member(self) -> Generator[None, None, bool]:
        """Reads one `"key": value`; returns whether it was well formed."""
        reader = self._reader
        yield from reader.spaces()
        key = yield from reader.json_string()
        yield from reader.spaces()
        if key is None or not (yield from reader.literal(":")):
            return False
        yield from reader.spaces()
        if key == "name" and not self.has_begun:
            name = yield from reader.json_string()
            if not name:
                return False
            self._begin(name)
            return True
        if key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            return (yield from self._arguments())
        return (yield from reader.json_value(ignore))

    def _arguments(self) -> Generator[None, None, bool]:
        sink: Sink = self._out.arguments if self.has_begun else self._held.append
        if (yield from self._reader.peek()) != '"':
            return (yield from self._reader.json_value(sink))
        parts: list[str] = []  # some models write the object as text
        is_whole = yield from self._reader.json_value(parts.append)
        text = "".join(parts)
        is_cut = not is_whole and self._reader.is_cut
        decoded = decoded_string(text.rstrip("\\") + '"' if is_cut else text)
        sink(text if decoded is None else decoded)
        return is_whole

    def _begin(self, name: str) -> None:
        self.has_begun = True
        self._out.begin_call(name)
        for part in self._held:
            self._out.arguments(part)


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
        """Reads one call and its closing tag; returns whether it was one, complete or not."""


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
        """Reads one key and its value; returns whether both were complete."""
        reader, key = self._reader, list[str]()
        if not (yield from reader.until((END_KEY,), key.append)):
            return False
        yield from reader.spaces()
        if not (yield from reader.literal(VALUE)):
            return False
        is_whole = yield from arguments.read("".join(key), (END_VALUE,))
        yield from reader.spaces()
        return is_whole


def new_mistral_id() -> str:
    """Makes a call id. Mistral's templates accept only ids of nine letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class MistralParser(ReadingParser):
    def _read(self) -> Reading:
        reader, out = self._reader, self._out
        while (yield from reader.until((CALLS,), out.content, self._is_after_call)):
            reader.start_record(CALLS)
            yield from reader.spaces()
            is_list = yield from reader.literal("[")
            is_call = yield from (self._list() if is_list else self._named())
            text = reader.stop_record()
            self._end_markup(text, is_call=is_call)

    def _list(self) -> Generator[None, None, bool]:
        reader, num_calls = self._reader, 0
        while True:
            yield from reader.spaces()
            if not (yield from JsonCall(reader, self._out).read()):
                break
            num_calls += 1
            yield from reader.spaces()
            if not (yield from reader.literal(",")):
                break
        yield from reader.literal("]")
        return num_calls > 0

    def _named(self) -> Generator[None, None, bool]:
        reader = self._reader
        name, call_id = (yield from reader.word()), None
        if (yield from reader.literal(CALL_ID)):
            call_id = yield from reader.word()
        yield from reader.literal(ARGS)
        yield from reader.spaces()
        if not name or (yield from reader.peek()) != "{":
            return False
        self._out.begin_call(name, call_id)
        yield from reader.json_value(self._out.arguments)
        self._out.end_call(is_cut=reader.is_cut)
        return True
