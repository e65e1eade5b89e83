"""Converts the answer to content blocks, and to the events of a stream.

One block is open at a time: content_block_start, deltas, content_block_stop.

    reasoning   thinking   thinking_delta, at its end signature_delta
    content     text       text_delta
    a call      tool_use   input_json_delta
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from moe_serve.text.assistant.delta import AssistantDelta, CallDelta

Event = dict[str, Any]
Block = dict[str, Any]
# For each type of block: its field that grows, the type of the delta and the delta's field.
_GROWTH: Mapping[str, tuple[str, str, str]] = {
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "text": ("text", "text_delta", "text"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}


class ContentBlocks:
    """Takes deltas and returns events. `blocks` has the finished blocks."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._parts: list[str] = []
        self._call_index = -1

    def push(self, delta: AssistantDelta) -> list[Event]:
        events: list[Event] = []
        # the rest of an open call comes first, because text would close its block
        begun = self._call_index
        for call in delta.calls:
            if call.index == begun:
                events += self._call(call)
        if delta.reasoning:
            events += self._begin_if_other({"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._grow(delta.reasoning))
        if delta.content:
            events += self._begin_if_other({"type": "text", "text": ""})
            events.append(self._grow(delta.content))
        for call in delta.calls:
            if call.index != begun:
                events += self._call(call)
        return events

    def finish(self) -> list[Event]:
        """Closes the open block. An answer without blocks gets an empty text."""
        events: list[Event] = []
        if self._open is None and not self.blocks:
            events += self._begin({"type": "text", "text": ""})
        return events + self._end()

    def _call(self, delta: CallDelta) -> list[Event]:
        events: list[Event] = []
        if delta.index != self._call_index:
            assert delta.index == self._call_index + 1, "calls come one after the other"
            self._call_index = delta.index
            block: Block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            events += self._end() + self._begin(block)
        if delta.arguments:
            events.append(self._grow(delta.arguments))
        return events

    def _begin_if_other(self, block: Block) -> list[Event]:
        if self._open is not None and self._open["type"] == block["type"]:
            return []
        return self._end() + self._begin(block)

    def _begin(self, block: Block) -> list[Event]:
        self._open, self._parts = block, []
        index = len(self.blocks)
        return [{"type": "content_block_start", "index": index, "content_block": block}]

    def _grow(self, text: str) -> Event:
        assert self._open is not None, "only an open block grows"
        self._parts.append(text)
        _, kind, field = _GROWTH[self._open["type"]]
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}

    def _end(self) -> list[Event]:
        if self._open is None:
            return []
        index, kind = len(self.blocks), self._open["type"]
        text = "".join(self._parts)
        grown = call_input(text) if kind == "tool_use" else text
        block = {**self._open, _GROWTH[kind][0]: grown}
        events: list[Event] = [{"type": "content_block_stop", "index": index}]
        if kind == "thinking":
            block["signature"] = _signature(text)
            delta = {"type": "signature_delta", "signature": block["signature"]}
            events.insert(0, {"type": "content_block_delta", "index": index, "delta": delta})
        self.blocks.append(block)
        self._open = None
        return events


def _signature(thinking: str) -> str:
    """A signature for thinking blocks. It proves nothing and is not checked when it comes back.

    Clients expect a signature and send it back, and some drop thinking blocks without one.
    """
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


def call_input(arguments: str) -> dict[str, Any]:
    """The input object of a call. Text that is not an object (a cut call) becomes the field
    `_raw`."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {"_raw": arguments}
    return value if isinstance(value, dict) else {"_raw": arguments}
