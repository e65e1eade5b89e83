"""A chat and the options of its answer, whichever API they came from.

The routes of OpenAI's chats and responses and of Anthropic's messages check their own bodies and
build these. Everything after that is the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moe_serve.adapters.adapter import Adapter
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.http.generation.service_tiers import NO_ENTITLEMENT, Entitlement
from moe_serve.http.schema.chat_messages import (
    ChatMessage,
    ReasoningEffort,
    template_messages,
    template_options,
)
from moe_serve.http.schema.service_fields import NO_WISH, ServiceWish
from moe_serve.http.schema.tool_fields import ToolDefinition, tool_dicts
from moe_serve.text.chat_template import join_text_parts

TruncationSide = Literal["left", "right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Shortens a prompt to at most `limit` tokens; -1 leaves room for the answer in the context.

    `side` is the side where tokens are dropped, as in vLLM: "right" keeps the first tokens, "left"
    and None keep the last.
    """

    limit: int
    side: TruncationSide | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The part of a request that determines its prompt and the parsing of its answer.

    /tokenize and the routes that count tokens need only this; an answer also needs `AnswerOptions`.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: str | dict[str, str] | None = None  # a word, or the name of a function
    is_parallel: bool = True  # an answer may have several calls
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: ReasoningEffort | None = None
    separates_reasoning: bool = True  # else it is a part of the content
    shows_reasoning: bool = True
    continues: bool = False  # the answer continues the last message
    adds_generation_prompt: bool = True
    echoes: bool = False  # the answer repeats the message that it continues
    truncation: Truncation | None = None

    @property
    def called_tools(self) -> tuple[ToolDefinition, ...]:
        """The tools that the answer may call. With tool_choice "none" the model sees no tools."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def named_tool(self) -> str | None:
        """The function that the answer must call."""
        return self.tool_choice["name"] if isinstance(self.tool_choice, dict) else None

    @property
    def forces_call(self) -> bool:
        """True if the answer must be a tool call."""
        return self.tool_choice == "required" or self.named_tool is not None

    @property
    def has_calls(self) -> bool:
        """True if an earlier answer called functions."""
        return any(message.tool_calls for message in self.messages)

    @property
    def echoed(self) -> str:
        """The content of a last assistant message, if it is repeated before the answer."""
        last = self.messages[-1]
        if not self.echoes or last.role != "assistant":
            return ""
        content = last.content or ""
        return content if isinstance(content, str) else join_text_parts(content, "messages")

    @property
    def is_thinking_off(self) -> bool:
        """True if the chat template is told to switch reasoning off."""
        options = self.template_options()
        return any(options.get(name) is False for name in ("enable_thinking", "thinking"))

    def template_messages(self, *, has_text_arguments: bool) -> list[dict[str, Any]]:
        return template_messages(self.messages, has_text_arguments=has_text_arguments)

    def template_tools(self) -> list[dict[str, Any]] | None:
        return tool_dicts(self.called_tools) or None

    def template_options(self) -> dict[str, Any]:
        return template_options(self.template_kwargs, self.reasoning_effort)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """The options of an answer as a client asked for them, in a chat or a completion.

    The fields ending in `_field` are the client's names, for errors. `default_max_tokens` None: up
    to the end of the context.
    """

    params: SamplingParams
    constraint_field: str | None = None  # the field that the constraint came from
    max_tokens_field: str = "max_tokens"
    prompt_logprobs_field: str = "prompt_logprobs"
    default_max_tokens: int | None = None
    cache_salt: str = ""
    priority: int | None = None  # None: that of the API key
    is_streamed: bool = False
    wants_routed_experts: bool = False
    may_draft: bool = True  # drafted tokens may be verified for it
    prediction: str | None = None  # the answer that the client expects
    wish: ServiceWish = NO_WISH
    entitlement: Entitlement = NO_ENTITLEMENT  # the service that the request gets
    adapter: Adapter | None = None  # None: the base model
