"""The addition of one piece of a model's text to the assistant's message."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """The new part of tool call `index` of the message.

    `id` and `name` come once, with the call's first delta; `arguments` is the new part of the JSON
    text. A later index never begins before the previous call has ended.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantDelta:
    """New text of the message, in the order reasoning, content, calls.

    The rest of a call that began in an earlier delta comes before all of these.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.calls)


NOTHING = AssistantDelta()


def joined(first: AssistantDelta, second: AssistantDelta) -> AssistantDelta:
    """Combine two deltas into one."""
    if first.is_empty:
        return second
    if second.is_empty:
        return first
    return AssistantDelta(
        content=first.content + second.content,
        reasoning=first.reasoning + second.reasoning,
        calls=first.calls + second.calls,
    )
