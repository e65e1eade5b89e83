"""POST /v1/messages and /v1/messages/count_tokens: the routes and the answers.

An answer is a list of content blocks, or the events of a stream. One block is open at a time:
content_block_start, deltas, content_block_stop.

    reasoning   thinking   thinking_delta, at its end signature_delta
    content     text       text_delta
    a call      tool_use   input_json_delta
"""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import Request, Response

from moe_serve.errors import ContextLengthError
from moe_serve.http.anthropic.message_body import CountTokensBody, MessagesBody
from moe_serve.http.anthropic.message_chat import (
    OWN_IGNORED,
    OWN_NAMES,
    TranslatedMessages,
    translate,
)
from moe_serve.http.generation.chat_fields import own_ignored, renamed_fields
from moe_serve.http.generation.chat_generation import (
    TOOL_CALLS,
    ChatGeneration,
    ChatPiece,
    start_chat,
)
from moe_serve.http.generation.chat_request import AnswerOptions, Chat
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.prompts import render_prompt
from moe_serve.http.generation.requests import with_entitlement
from moe_serve.http.generation.respond import (
    SseResponse,
    SseStyle,
    request_body_schema,
    whole_response,
)
from moe_serve.http.generation.usage import Usage
from moe_serve.http.schema.api_error import ApiError
from moe_serve.http.schema.field_types import parse_body
from moe_serve.http.schema.json_body import read_json_object
from moe_serve.http.schema.parameters import ignored_header
from moe_serve.http.wire.late_routes import LateRouter
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
    """Returns a signature for thinking blocks. It proves nothing and is not checked when it comes
    back.

    Clients expect a signature and send it back, and some drop thinking blocks without one.
    """
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


def call_input(arguments: str) -> dict[str, Any]:
    """Returns the input object of a call. Text that is not an object (a cut call) becomes the field
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
        self,
        message_id: str,
        model: str,
        chat: ChatGeneration,
        *,
        is_cut_by_context: bool,
        service_tier: str | None = None,
    ) -> None:
        self.chat = chat
        self._tier = {} if service_tier is None else {"service_tier": service_tier}
        self.result: dict[str, Any] = {}
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._is_cut_by_context = is_cut_by_context
        self._content = ContentBlocks()
        self._reason: dict[str, Any] = _NO_REASON

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the server-sent events. One chunk may hold several."""
        num_tokens = len(self.chat.prompt.token_ids)
        none_yet = Usage(prompt_tokens=num_tokens, completion_tokens=0, cached_tokens=0)
        usage = usage_json(none_yet) | self._tier
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
        usage = usage_json(self.chat.usage()) | self._tier
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
    """Returns the usage. In this API, tokens found in the cache do not count as input."""
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


def messages_router(server: ServerContext) -> LateRouter:
    router = LateRouter(prefix=PATH)
    is_strict = server.config.is_strict

    def translated_body(body: CountTokensBody) -> TranslatedMessages:
        has_reasoning = server.assistant.reasoning is not None
        return translate(body, is_strict=is_strict, has_reasoning=has_reasoning)

    @router.post("", openapi_extra=request_body_schema(MessagesBody))
    async def create_message(request: Request) -> Response:
        content = await read_json_object(request, server.config.max_body_bytes)
        body = parse_body(MessagesBody, content)
        translated = translated_body(body)
        named = await server.model.named(body.model)
        message_id = f"msg_{uuid.uuid4().hex}"
        with _own_words():
            unheeded = server.assistant.check(translated.chat, server.model)
            options = translated.options(is_streamed=body.stream)
            options = with_entitlement(server, options, request.headers)
            options = replace(options, adapter=named.adapter)
            chat, is_cut = await _start(server, translated.chat, options, message_id)
        entitlement = options.entitlement
        run = MessageRun(
            message_id,
            named.name,
            chat,
            is_cut_by_context=is_cut,
            service_tier=entitlement.shown_tier,
        )
        of_chat = own_ignored([*unheeded, *chat.ignored], OWN_IGNORED)
        ignored = entitlement.unheeded([*translated.ignored, *of_chat])
        headers = {**ignored_header(ignored), **chat.headers}
        if body.stream:
            ping_s = server.config.sse_ping_s
            return SseResponse(
                run.events(), ping_s=ping_s, on_close=chat.close, headers=headers, style=STYLE
            )
        return await whole_response(_whole(run), chat, request, headers)

    @router.post("/count_tokens", openapi_extra=request_body_schema(CountTokensBody))
    async def count_tokens(request: Request, response: Response) -> dict[str, Any]:
        content = await read_json_object(request, server.config.max_body_bytes)
        body = parse_body(CountTokensBody, content)
        translated = translated_body(body)
        server.model.check_name(body.model)
        with _own_words():
            unheeded = server.assistant.check(translated.chat, server.model)
            ignored = [*translated.ignored, *own_ignored(unheeded, OWN_IGNORED)]
            response.headers.update(ignored_header(ignored))
            prompt = await render_prompt(translated.chat, server.model)
        return {"input_tokens": len(prompt.token_ids)}

    return router


@contextmanager
def _own_words() -> Iterator[None]:
    """Rewrites errors of the chat in the field names and wording of Anthropic's API."""
    try:
        with renamed_fields(OWN_NAMES):
            yield
    except ContextLengthError as error:
        if error.num_prompt_tokens is None:
            raise
        count, limit = error.num_prompt_tokens, error.max_prompt_tokens
        words = f"prompt is too long: {count} tokens > {limit} maximum"
        raise error.reworded(words, error.param) from error


async def _start(
    server: ServerContext, chat: Chat, options: AnswerOptions, message_id: str
) -> tuple[ChatGeneration, bool]:
    """Starts the chat; returns it, and True if the context has less room than max_tokens.

    Clients of this API must send max_tokens, and send values meant for models with long contexts.
    If the value does not fit, the answer may use the rest of the context.
    """
    try:
        return await start_chat(server, chat, options, message_id, splits_runs=True), False
    except ContextLengthError as error:
        if error.param != options.max_tokens_field:
            raise
    to_the_end = replace(options, params=replace(options.params, max_tokens=None))
    return await start_chat(server, chat, to_the_end, message_id, splits_runs=True), True


async def _whole(run: MessageRun) -> bytes:
    async for _ in run.events():
        continue
    return msgspec.json.encode(run.result)
