"""Parses calls as Hermes and Qwen3 write them.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

from moe_serve.text.assistant.json_call import JsonCall
from moe_serve.text.assistant.parser import ReadingParser
from moe_serve.text.assistant.reader import Reading

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ReadingParser):
    def _read(self) -> Reading:
        reader, out = self._reader, self._out
        while (yield from reader.until((OPEN,), out.content, self._is_after_call)):
            reader.start_record(OPEN)
            yield from reader.spaces()
            is_call = yield from JsonCall(reader, out).read()
            if is_call:
                yield from reader.spaces()
                yield from reader.literal(CLOSE)
            text = reader.stop_record()
            self._end_markup(text, is_call=is_call)
