"""Writes the responses and stream chunks of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from moe_serve.http.generation.chat_generation import ChatPiece
from moe_serve.http.generation.logprob_format import (
    chat_logprobs,
    prompt_logprobs,
    routed_fields,
    routed_json,
)
from moe_serve.http.generation.usage import Usage
from moe_serve.http.openai.answers import (
    ChatChoice,
    ChunkWriter,
    ResponseHead,
    timing_fields,
    usage_fields,
)
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
    """The fields of a delta that have new content. Reasoning is sent under both common names."""
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
    """The complete answer as one object.

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
    """The assistant's message. If it has only calls, its content is null."""
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
