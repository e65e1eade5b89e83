"""Runs one message from start to end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from moe_serve.http.anthropic.content_blocks import ContentBlocks, Event
from moe_serve.http.generation.chat_generation import TOOL_CALLS, ChatGeneration, ChatPiece
from moe_serve.http.generation.sse import SseStyle
from moe_serve.http.generation.usage import Usage
from moe_serve.http.schema.errors import ApiError

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
