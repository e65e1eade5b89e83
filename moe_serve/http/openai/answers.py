"""Collects complete answers, and writes the JSON that chats and completions share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from moe_serve.engine.request.request import FinishReason, TokenExperts, TokenLogprob
from moe_serve.http.generation.answer_sequence import Piece
from moe_serve.http.generation.chat_generation import ChatGeneration, ChatPiece
from moe_serve.http.generation.generation import Generation
from moe_serve.http.generation.logprob_format import (
    IDS_PER_LOGPROB,
    MAX_INLINE_LOGPROBS,
    num_expert_ids,
    num_logprobs,
)
from moe_serve.http.generation.respond import sse_event
from moe_serve.http.generation.usage import Usage
from moe_serve.text.assistant.outbox import CallDelta


@dataclass(slots=True)
class Choice:
    """One choice of the answer, filled piece by piece."""

    text_parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    routed_experts: list[TokenExperts] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.text_parts)

    def add(self, piece: Piece) -> None:
        delta = piece.delta
        self.text_parts.append(delta.text)
        self.token_ids += delta.token_ids
        self.text_offsets += delta.text_offsets
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        if delta.routed_experts is not None:
            self.routed_experts = self.routed_experts or []
            self.routed_experts += delta.routed_experts
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


async def written_answer(choices: Sequence[Choice], write: Callable[[], bytes]) -> bytes:
    """Calls `write`, off the event loop if there are many log probabilities or experts."""
    count = sum(num_logprobs(choice.logprobs, choice.prompt_logprobs) for choice in choices)
    count += sum(num_expert_ids(choice.routed_experts) for choice in choices) // IDS_PER_LOGPROB
    return write() if count <= MAX_INLINE_LOGPROBS else await asyncio.to_thread(write)


async def collect(generation: Generation, num_choices: int) -> list[Choice]:
    """Runs the generation to its end."""
    choices = [Choice() for _ in range(num_choices)]
    async for pieces in generation:
        for piece in pieces:
            choices[piece.index].add(piece)
    return choices


@dataclass(slots=True)
class ToolCall:
    """One tool call of the message, filled delta by delta."""

    id: str
    name: str
    argument_parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.argument_parts)


@dataclass(slots=True)
class ChatChoice:
    """One choice of the answer. `raw` has its tokens, log probabilities and unparsed text."""

    raw: Choice = field(default_factory=Choice)
    content_parts: list[str] = field(default_factory=list)
    reasoning_parts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        return "".join(self.content_parts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_parts)

    @property
    def stop_reason(self) -> str | int | None:
        return self.raw.stop_reason

    def add(self, piece: ChatPiece) -> None:
        self.raw.add(piece.raw)
        self.content_parts.append(piece.delta.content)
        self.reasoning_parts.append(piece.delta.reasoning)
        for call in piece.delta.calls:
            self._add_call(call)
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason

    def _add_call(self, delta: CallDelta) -> None:
        if delta.index == len(self.calls):
            assert delta.id is not None and delta.name is not None, (
                "a call begins with its id and name"
            )
            self.calls.append(ToolCall(delta.id, delta.name))
        self.calls[delta.index].argument_parts.append(delta.arguments)


async def collect_chat(generation: ChatGeneration) -> list[ChatChoice]:
    """Runs the generation to its end."""
    choices = [ChatChoice() for _ in range(generation.num_choices)]
    async for pieces in generation:
        for piece in pieces:
            choices[piece.index].add(piece)
    return choices


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """The fields at the start of a response and of every chunk of its stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: str | None = None  # None: the answer has no such field

    def fields(self) -> dict[str, Any]:
        tier = {} if self.service_tier is None else {"service_tier": self.service_tier}
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            **tier,
        }


class ChunkWriter:
    """Writes chunks with one choice each. The head is encoded once, the choice for every chunk.

    With `include_usage`, every chunk but the last has `"usage": null`, as OpenAI's do. With
    `usage_now`, each chunk has the usage so far instead, which counts the tokens of this chunk and
    of those before it, as reported to `count`.
    """

    def __init__(
        self,
        head: ResponseHead,
        *,
        has_usage: bool,
        usage_now: Callable[[], Usage] | None = None,
    ) -> None:
        self._usage_now = usage_now
        self._num_tokens = 0
        self._head = msgspec.json.encode(head.fields())[:-1]
        tail = b'],"usage":null}' if has_usage else b"]}"
        self._start = b"data: " + self._head + b',"choices":['
        self._end = tail + b"\n\n"

    def count(self, num_tokens: int) -> None:
        """Adds the number of answer tokens that the next chunk brings."""
        self._num_tokens += num_tokens

    def choice(self, choice_json: bytes, more: bytes = b"") -> bytes:
        """Writes one chunk. `more` has further fields of the chunk, each with a comma in front."""
        if self._usage_now is not None:
            so_far = replace(self._usage_now(), completion_tokens=self._num_tokens)
            usage = msgspec.json.encode(usage_fields(so_far))
            return self._start + choice_json + b"]" + more + b',"usage":' + usage + b"}\n\n"
        if more:
            return self._start + choice_json + b"]" + more + self._end[1:]
        return self._start + choice_json + self._end

    def usage(self, usage: Usage) -> bytes:
        last = {"choices": [], "usage": usage_fields(usage), **timing_fields(usage)}
        return sse_event(self._head + b"," + msgspec.json.encode(last)[1:])


def cached_fields(usage: Usage) -> dict[str, Any]:
    """Returns the cached tokens of a prompt, by the tier that had them if some were on a disk, and
    the tokens that a `kv_window` dropped."""
    fields: dict[str, Any] = {"cached_tokens": usage.cached_tokens}
    if usage.tier_tokens:
        memory = usage.cached_tokens - usage.tier_tokens
        fields["cached_tokens_by_tier"] = {"memory": memory, "disk": usage.tier_tokens}
    if usage.kv_dropped_tokens is not None:
        fields["kv_dropped_tokens"] = usage.kv_dropped_tokens
    return fields


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Returns the `usage` object. Only chats have `completion_tokens_details`: nothing else has
    reasoning."""
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": cached_fields(usage),
    }
    if usage.reasoning_tokens is not None:
        details = fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        if usage.prediction is not None:
            details["accepted_prediction_tokens"] = usage.prediction.num_accepted
            details["rejected_prediction_tokens"] = usage.prediction.num_rejected
    return fields


def timing_fields(usage: Usage) -> dict[str, Any]:
    """Returns the fields `metrics` (vLLM) and `timings` (llama.cpp), if the server reports them."""
    told = {"metrics": usage.timing, "timings": usage.llama_timings}
    return {name: times for name, times in told.items() if times is not None}
