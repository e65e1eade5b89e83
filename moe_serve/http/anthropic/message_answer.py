"""Generates the answer to a message, as content blocks or as the events of a stream.

One block is open at a time: content_block_start, deltas, content_block_stop.

    reasoning   thinking   thinking_delta, at its end signature_delta
    content     text       text_delta
    a call      tool_use   input_json_delta
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from moe_serve.http.generation.chat_generation import TOOL_CALLS, ChatGeneration, ChatPiece
from moe_serve.http.generation.respond import SseStyle
from moe_serve.http.generation.usage import Usage
from moe_serve.http.schema.api_error import ApiError
from moe_serve.text.assistant.outbox import AssistantDelta, CallDelta

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


PATH = "/v1/messages"
_NO_REASON = {"stop_reason": None, "stop_sequence": None}


class MessageRun:
    """Reads the chat and makes events from it.

    `result` is the message after `events` has ended. `is_cut_by_context`: the answer is limited by
    the context, which is less than the client requested.
    """

    def __init__(
        self, message_id: str, model: str, chat: ChatGeneration, *, is_cut_by_context: bool
    ) -> None:
        self.chat = chat
        self.result: dict[str, Any] = {}
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._is_cut_by_context = is_cut_by_context
        self._content = ContentBlocks()
        self._reason: dict[str, Any] = _NO_REASON

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events. One chunk may hold several."""
        num_tokens = len(self.chat.prompt.token_ids)
        usage = usage_json(Usage(prompt_tokens=num_tokens, completion_tokens=0, cached_tokens=0))
        start: dict[str, Any] = {**self._head, "content": [], **_NO_REASON, "usage": usage}
        yield _write([{"type": "message_start", "message": start}])
        async for pieces in self.chat:
            yield _write([event for piece in pieces for event in self._push(piece)])
        yield _write(self._finish())

    def _push(self, piece: ChatPiece) -> list[Event]:
        if piece.finish_reason is not None:
            self._reason = self._stop(piece.finish_reason, piece.stop_reason)
        return self._content.push(piece.delta)

    def _finish(self) -> list[Event]:
        events = self._content.finish()
        usage = usage_json(self.chat.usage())
        blocks = self._content.blocks
        self.result = {**self._head, "content": blocks, **self._reason, "usage": usage}
        end = {"type": "message_delta", "delta": self._reason, "usage": usage}
        return [*events, end, {"type": "message_stop"}]

    def _stop(self, finish_reason: str, stopped_by: str | int | None) -> dict[str, Any]:
        if finish_reason == TOOL_CALLS:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if finish_reason == "length":
            is_cut = self._is_cut_by_context
            name = "model_context_window_exceeded" if is_cut else "max_tokens"
            return {"stop_reason": name, "stop_sequence": None}
        if isinstance(stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def usage_json(usage: Usage) -> dict[str, Any]:
    """The usage. In this API, tokens found in the cache do not count as input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens or 0},
    }


def _write(events: Sequence[Event]) -> bytes:
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))
        for event in events
    )


def _error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: %s\n\n" % error.body(PATH)


STYLE = SseStyle(write_error=_error_event, end=b"", ping=_write([{"type": "ping"}]))
