"""POST /v1/chat/completions: the route, its responses and its stream chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import Request, Response

from moe_serve.http.generation.chat_generation import ChatGeneration, ChatPiece, start_chat
from moe_serve.http.generation.chat_request import AnswerOptions, Chat
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.logprob_format import (
    chat_logprobs,
    prompt_logprobs,
    routed_fields,
    routed_json,
)
from moe_serve.http.generation.requests import with_entitlement
from moe_serve.http.generation.respond import request_body_schema, stream_response, whole_response
from moe_serve.http.generation.usage import Usage
from moe_serve.http.openai.answers import (
    ChatChoice,
    ChunkWriter,
    ResponseHead,
    collect_chat,
    timing_fields,
    usage_fields,
    written_answer,
)
from moe_serve.http.openai.bodies import ChatBody
from moe_serve.http.schema.field_types import parse_body
from moe_serve.http.schema.json_body import read_json_object
from moe_serve.http.schema.parameters import ignored_header
from moe_serve.http.wire.late_routes import LateRouter
from moe_serve.text.assistant.outbox import AssistantDelta, CallDelta
from moe_serve.text.tokenizer import Tokenizer

_ROLE = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'


class ChatChunks:
    """Writes the events of one chat stream: a role, then content, then the finish reason.

    `prompt_token_ids`, if given, are sent with the role, and each later chunk has the ids of its
    new tokens.
    """

    def __init__(
        self,
        head: ResponseHead,
        tokenizer: Tokenizer,
        *,
        has_usage: bool,
        usage_now: Callable[[], Usage] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> None:
        self._writer = ChunkWriter(head, has_usage=has_usage, usage_now=usage_now)
        self._prompt_token_ids = prompt_token_ids
        self._tokenizer = tokenizer
        self._started: set[int] = set()

    def events(self, piece: ChatPiece) -> bytes:
        index = b'{"index":%d,' % piece.index
        events: list[bytes] = []
        if piece.index not in self._started:
            self._started.add(piece.index)
            events.append(self._writer.choice(index + _ROLE, self._prompt_ids()))
        self._writer.count(len(piece.token_ids))
        has_ids = self._prompt_token_ids is not None and bool(piece.token_ids)
        has_more = has_ids or bool(piece.raw.delta.routed_experts)
        if not piece.delta.is_empty or piece.logprobs or has_more:
            events.append(self._writer.choice(index + self._delta(piece)))
        if piece.finish_reason is not None:
            events.append(self._writer.choice(index + _finish(piece)))
        return b"".join(events)

    def usage(self, usage: Usage) -> bytes:
        return self._writer.usage(usage)

    def _delta(self, piece: ChatPiece) -> bytes:
        logprobs = b"null"
        if piece.logprobs is not None:
            logprobs = msgspec.json.encode(chat_logprobs(piece.logprobs, self._tokenizer))
        delta = msgspec.json.encode(_delta_fields(piece.delta))
        raw = piece.raw.delta
        routed = routed_json(raw.routed_experts, raw.token_ids, self._tokenizer)
        ids = b""
        if self._prompt_token_ids is not None:
            ids = b',"token_ids":' + msgspec.json.encode(piece.token_ids)
        end = b',"logprobs":' + logprobs + b',"finish_reason":null' + ids + routed + b"}"
        return b'"delta":' + delta + end

    def _prompt_ids(self) -> bytes:
        if self._prompt_token_ids is None:
            return b""
        return b',"prompt_token_ids":' + msgspec.json.encode(self._prompt_token_ids)


def _delta_fields(delta: AssistantDelta) -> dict[str, Any]:
    """Returns the fields of a delta that have new content. Reasoning is sent under both common
    names."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning"] = fields["reasoning_content"] = delta.reasoning
    if delta.content or not (delta.reasoning or delta.calls):
        fields["content"] = delta.content
    if delta.calls:
        fields["tool_calls"] = [_call_delta(call) for call in delta.calls]
    return fields


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _finish(piece: ChatPiece) -> bytes:
    reason = msgspec.json.encode(piece.finish_reason)
    stop = msgspec.json.encode(piece.stop_reason)
    return (
        b'"delta":{},"logprobs":null,"finish_reason":' + reason + b',"stop_reason":' + stop + b"}"
    )


def chat_response(
    head: ResponseHead,
    choices: Sequence[ChatChoice],
    usage: Usage,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] | None = None,
) -> bytes:
    """Returns the complete answer as one object.

    With `prompt_token_ids` it has the token ids of the prompt and of the answer.
    """
    content: dict[str, Any] = {
        **head.fields(),
        "choices": [_choice(i, choice, tokenizer) for i, choice in enumerate(choices)],
        "usage": usage_fields(usage),
        **timing_fields(usage),
    }
    if prompt_token_ids is not None:
        content["prompt_token_ids"] = prompt_token_ids
        for fields, choice in zip(content["choices"], choices, strict=True):
            fields["token_ids"] = choice.raw.token_ids
    if (entries := prompt_logprobs(choices[0].raw.prompt_logprobs, tokenizer)) is not None:
        content["prompt_logprobs"] = entries
    return msgspec.json.encode(content)


def _choice(index: int, choice: ChatChoice, tokenizer: Tokenizer) -> dict[str, Any]:
    assert choice.finish_reason is not None, "a collected choice has a finish reason"
    logprobs = None
    # encoded at once: as Python objects they would take too much memory
    if choice.raw.logprobs is not None:
        logprobs = msgspec.Raw(msgspec.json.encode(chat_logprobs(choice.raw.logprobs, tokenizer)))
    routed, experts = {}, choice.raw.routed_experts
    if experts is not None:
        routed = routed_fields(experts, choice.raw.token_ids, tokenizer)
    return {
        "index": index,
        "message": message_fields(choice),
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        **routed,
    }


def message_fields(choice: ChatChoice) -> dict[str, Any]:
    """Returns the assistant's message. If it has only calls, its content is null."""
    content, reasoning = choice.content, choice.reasoning
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if choice.calls and not content else content,
        "refusal": None,
    }
    if reasoning:
        message["reasoning"] = message["reasoning_content"] = reasoning
    if choice.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in choice.calls
        ]
    return message


def chat_router(server: ServerContext) -> LateRouter:
    router = LateRouter()

    @router.post("/v1/chat/completions", openapi_extra=request_body_schema(ChatBody))
    async def create_chat_completion(request: Request) -> Response:
        content = await read_json_object(request, server.config.max_body_bytes)
        call = await read_chat(server, content, request.headers)
        generation = await start_chat(server, call.chat, call.options, call.internal_id)
        return await answer_chat(server, call, generation, request)

    return router


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A checked request. `ignored` names the fields without effect."""

    body: ChatBody
    chat: Chat
    options: AnswerOptions
    head: ResponseHead
    internal_id: str  # the client sees `head.id`, which it may choose
    ignored: tuple[str, ...]


async def read_chat(
    server: ServerContext, content: Mapping[str, Any], headers: Mapping[str, str]
) -> ChatCall:
    """Checks a request. `content` is its parsed body."""
    body = parse_body(ChatBody, content)
    ignored = body.check(is_strict=server.config.is_strict)
    named = await server.model.named(body.model)
    chat, internal_id = body.chat(), f"chatcmpl-{uuid.uuid4().hex}"
    unheeded = server.assistant.check(chat, server.model)
    if body.prediction is not None and not server.speculates:
        ignored.append("prediction")
    options = with_entitlement(server, body.options(), headers)
    options = replace(options, adapter=named.adapter)
    head = ResponseHead(
        id=f"chatcmpl-{body.request_id}" if body.request_id else internal_id,
        object="chat.completion.chunk" if body.stream else "chat.completion",
        created=int(time.time()),
        model=named.name,
        system_fingerprint=named.fingerprint,
        service_tier=options.entitlement.shown_tier,
    )
    return ChatCall(
        body=body,
        chat=chat,
        options=options,
        head=head,
        internal_id=internal_id,
        ignored=tuple(options.entitlement.unheeded([*ignored, *unheeded])),
    )


async def answer_chat(
    server: ServerContext, call: ChatCall, generation: ChatGeneration, request: Request
) -> Response:
    """Sends the answer, streamed or complete."""
    body, tokenizer = call.body, server.model.tokenizer
    headers = {**ignored_header([*call.ignored, *generation.ignored]), **generation.headers}
    is_forced = server.config.force_include_usage
    has_usage, has_usage_in_chunks = body.stream_usage(is_forced=is_forced)
    token_ids = generation.prompt.token_ids if body.return_token_ids else None
    if body.stream:
        return stream_response(
            generation,
            ChatChunks(
                call.head,
                tokenizer,
                has_usage=has_usage,
                usage_now=generation.usage if has_usage_in_chunks else None,
                prompt_token_ids=token_ids,
            ),
            has_usage=has_usage,
            ping_s=server.config.sse_ping_s,
            headers=headers,
        )
    answer = _answer(generation, call.head, tokenizer, token_ids)
    return await whole_response(answer, generation, request, headers)


async def _answer(
    generation: ChatGeneration,
    head: ResponseHead,
    tokenizer: Tokenizer,
    prompt_token_ids: tuple[int, ...] | None,
) -> bytes:
    choices = await collect_chat(generation)
    usage = generation.usage()
    raw = [choice.raw for choice in choices]

    def write() -> bytes:
        return chat_response(head, choices, usage, tokenizer, prompt_token_ids)

    return await written_answer(raw, write)
