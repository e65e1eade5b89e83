"""Collects complete assistant messages, for clients that do not stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_serve.http.generation.chat_generation import ChatGeneration, ChatPiece
from moe_serve.http.openai.answer import Choice
from moe_serve.text.assistant.delta import CallDelta


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
