"""The messages between a server and the processes that render its chat templates.

Requests to the worker are JSON in Python's dialect: large integers, NaN and lone surrogates arrive
unchanged. Answers are a byte for the kind, followed by text.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Kind(enum.Enum):
    """The kinds of a worker's answers."""

    READY = b"o"  # the template is compiled; no text
    INVALID = b"i"  # the template cannot be compiled; the text gives the reason
    TEXT = b"t"  # the rendered chat
    REFUSED = b"r"  # the template called raise_exception; its message
    FAILED = b"f"  # the template raised; type and message
    HIDDEN = b"h"  # the output lacks the last message, which was to be continued
    LONG = b"c"  # more characters than allowed
    LATE = b"l"  # more time than allowed
    LARGE = b"m"  # more memory than allowed, or the worker crashed


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message to a worker: the template, and the limits of every rendering."""

    source: str
    special_tokens: Mapping[str, str]
    max_chars: int
    max_seconds: float
    max_bytes: int  # memory beyond that of the empty process

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> Setup:
        return cls(**json.loads(content))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One chat to be rendered. `options` are further names that the template may read.

    `continues`: the text must end where the content of the last message ends.
    """

    messages: list[dict[str, Any]]
    tools: list[Mapping[str, Any]] | None
    options: Mapping[str, Any]
    add_generation_prompt: bool
    continues: bool

    def encode(self) -> bytes:
        """Encodes the order.

        Raises TypeError, ValueError or RecursionError if JSON cannot represent the chat.
        """
        fields = (self.messages, self.tools, self.options)
        return json.dumps([*fields, self.add_generation_prompt, self.continues]).encode()

    @classmethod
    def decode(cls, content: bytes) -> Order:
        messages, tools, options, has_prompt, continues = json.loads(content)
        return cls(
            messages=messages,
            tools=tools,
            options=options,
            add_generation_prompt=has_prompt,
            continues=continues,
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to a Setup or an Order."""

    kind: Kind
    text: str = ""

    def encode(self) -> bytes:
        return self.kind.value + self.text.encode("utf-8", "surrogatepass")

    @classmethod
    def decode(cls, content: bytes) -> Reply:
        return cls(Kind(content[:1]), content[1:].decode("utf-8", "surrogatepass"))
