"""Collects complete answers and assistant messages, for clients that do not stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moe_serve.engine.request.request import FinishReason, TokenExperts, TokenLogprob
from moe_serve.http.generation.chat_generation import ChatGeneration, ChatPiece
from moe_serve.http.generation.generation import Generation
from moe_serve.http.generation.logprob_format import MAX_INLINE_LOGPROBS, num_logprobs
from moe_serve.http.generation.routed_experts import IDS_PER_LOGPROB, num_expert_ids
from moe_serve.http.generation.sequence import Piece
from moe_serve.text.assistant.delta import CallDelta


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
