"""The request bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from moe_serve.http.generation.chat_fields import EXTENSIONS
from moe_serve.http.schema.field_types import Int, StrictSchema, at_most
from moe_serve.http.schema.parameters import check_fields

MAX_MESSAGES = 4096
MAX_TOOLS = 256
_IGNORED = frozenset(
    {
        "cache_control",
        "diagnostics",
        "inference_geo",
        "metadata",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "context_management": ({}, {"edits": []}),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "mcp_servers": ([],),
    "thread": (),
}
_CHOICE_FIELDS = frozenset({"type", "name", "disable_parallel_tool_use"})
_FORMAT_FIELDS = frozenset({"type", "schema"})


class Thinking(StrictSchema):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = Field(default=None, ge=0, le=2**31 - 1)
    display: str | None = None


class OutputConfig(StrictSchema):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensBody(StrictSchema):
    """The fields that make up the prompt. `message_content.py` reads the blocks."""

    messages: Annotated[list[Any], at_most("messages", MAX_MESSAGES, at_least=1)]
    model: str | None = None
    system: Any = None
    tools: Annotated[list[Any], at_most("tools", MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def check(self, *, is_strict: bool, has_reasoning: bool) -> list[str]:
        """Returns the names of the fields without effect. Some have an effect only if the model
        `has_reasoning`.
        """
        extras = dict(self.model_extra or {})
        for name in EXTENSIONS:
            extras.pop(name, None)
        ignored = check_fields(extras, _IGNORED, _UNSERVED, "", is_strict)
        for prefix, part in (("thinking.", self.thinking), ("output_config.", self.output_config)):
            if part is not None:
                fields = part.model_extra or {}
                ignored += check_fields(fields, frozenset(), {}, prefix, is_strict)
        format_ = self.output_config and self.output_config.format
        for prefix, value, known in (
            ("tool_choice.", self.tool_choice, _CHOICE_FIELDS),
            ("output_config.format.", format_, _FORMAT_FIELDS),
        ):
            unread = {name: v for name, v in (value or {}).items() if name not in known}
            ignored += check_fields(unread, frozenset(), {}, prefix, is_strict)
        if (thinking := self.thinking) is not None:
            is_limited = has_reasoning and thinking.type == "enabled"
            if thinking.budget_tokens is not None and not is_limited:
                ignored.append("thinking.budget_tokens")
            if thinking.display is not None:
                ignored.append("thinking.display")
        return ignored

    @property
    def thinking_token_budget(self) -> int | None:
        """The limit of reasoning tokens. Only thinking of type "enabled" has one."""
        is_enabled = self.thinking is not None and self.thinking.type == "enabled"
        return self.thinking.budget_tokens if self.thinking and is_enabled else None


class MessagesBody(CountTokensBody):
    max_tokens: Int = Field(ge=1)
    stop_sequences: Annotated[list[str], at_most("strings", 8192)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
