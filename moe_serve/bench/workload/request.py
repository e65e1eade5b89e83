"""One request of a workload, before it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

# Text, token ids, or the messages of a chat.
Prompt: TypeAlias = "str | list[int] | list[dict[str, Any]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of a prompt; blocks with the same `key` have the same text."""

    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The time and size of a request, from a trace or from drawn lengths; the text is added
    later."""

    index: int
    at_s: float  # when it is due; meaningless in a closed loop
    prompt_tokens: int  # of the whole prompt
    output_tokens: int
    blocks: tuple[Block, ...] = ()  # how the prompt begins
    prompt: Prompt | None = None  # its own text, where the workload has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A request that is ready to be sent."""

    index: int
    at_s: float
    output_tokens: int
    body: bytes
