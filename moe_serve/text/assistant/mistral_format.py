"""Parses calls as Mistral's models write them, older and newer.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}, ...]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]...

Newer ones may write [CALL_ID]... before [ARGS], or leave [ARGS] out.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Generator

from moe_serve.text.assistant.json_call import JsonCall
from moe_serve.text.assistant.parser import ReadingParser
from moe_serve.text.assistant.reader import Reading

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ALPHABET = string.ascii_letters + string.digits


def new_mistral_id() -> str:
    """Make a call id. Mistral's templates accept only ids of nine letters and digits."""
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
