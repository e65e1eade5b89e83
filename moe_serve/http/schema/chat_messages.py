"""The messages of a chat, as clients send them and as chat templates take them.

A request may pass further options to the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from moe_serve.errors import InvalidRequestError
from moe_serve.http.schema.field_types import Content, StrictSchema
from moe_serve.http.schema.parameters import check_extra_message_fields, check_fields
from moe_serve.http.schema.tool_fields import CallList

_PART_FIELDS = frozenset({"type", "text"})
_REFUSAL_FIELDS = frozenset({"type", "refusal"})
_IGNORED_PART_FIELDS = frozenset(
    {"annotations", "cache_control", "id", "index", "prompt_cache_breakpoint"}
)
MAX_OPTIONS = 16
MAX_OPTION_CHARS = 256
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Names that the server sets itself, and names that would pass in a template or documents.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "conversation",
        "continue_final_message",
        "documents",
        "messages",
        "tokenize",
        "tools",
    }
)


class ChatMessage(StrictSchema):
    """One message of a chat.

    In an earlier answer `content` may be null, and it may be absent beside tool calls, reasoning or
    a refusal.

    An assistant message is an answer that a client sends back, with any fields that its library has
    added (`parsed`, `provider_specific_fields`). Unknown fields of such a message are never an
    error.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: CallList | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    @property
    def is_answer(self) -> bool:
        return self.role == "assistant"

    def check(self, index: int, *, is_strict: bool) -> list[str]:
        """Checks the message and returns the names of the fields that have no effect."""
        if self.content is None and not self._has_other_content:
            param = f"messages.{index}.content"
            if "content" in self.model_fields_set:
                raise InvalidRequestError(
                    f"{param} must be a string or a list of parts, got null.",
                    param=param,
                    code="invalid_type",
                )
            raise InvalidRequestError(
                f"{param} is missing.", param=param, code="missing_required_parameter"
            )
        if self.tool_calls and self.role != "assistant":
            param = f"messages.{index}.tool_calls"
            raise InvalidRequestError(
                f"{param} is only allowed in messages with the role assistant.", param=param
            )
        if self.tool_call_id is not None and self.role != "tool":
            param = f"messages.{index}.tool_call_id"
            raise InvalidRequestError(
                f"{param} is only allowed in messages with the role tool.", param=param
            )
        is_strict = is_strict and not self.is_answer
        ignored = check_extra_message_fields(self.model_extra or {}, index, is_strict=is_strict)
        if self.refusal is not None and not (self.is_answer and self.content is None):
            ignored.append(f"messages.{index}.refusal")
        return ignored + self._check_parts(f"messages.{index}.", is_strict=is_strict)

    @property
    def _has_other_content(self) -> bool:
        """True if an answer has more than content, or states explicitly that its content is
        empty."""
        if not self.is_answer:
            return False
        if "content" in self.model_fields_set:
            return True
        said = (self.reasoning, self.reasoning_content, self.refusal)
        return bool(self.tool_calls) or any(text is not None for text in said)

    def _check_parts(self, prefix: str, *, is_strict: bool) -> list[str]:
        """Returns the names of the fields without effect in its content parts and tool calls."""
        ignored: list[str] = []
        for i, part in enumerate(self.content if isinstance(self.content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" or (kind == "refusal" and self.is_answer):
                known = _PART_FIELDS if kind == "text" else _REFUSAL_FIELDS
                extras = {name: part[name] for name in part if name not in known}
                param = f"{prefix}content.{i}."
                ignored += check_fields(extras, _IGNORED_PART_FIELDS, {}, param, is_strict)
        for i, call in enumerate(self.tool_calls or ()):
            param = f"{prefix}tool_calls.{i}."
            for owner, at in ((call, param), (call.function, f"{param}function.")):
                extras = owner.model_extra or {}
                ignored += check_fields(extras, frozenset(), {}, at, is_strict)
        return ignored


def template_messages(
    messages: Sequence[ChatMessage], *, has_text_arguments: bool
) -> list[dict[str, Any]]:
    """Converts messages to the form that chat templates take.

    OpenAI's role "developer" becomes "system". Most templates want the arguments of calls as
    objects, a few as JSON text (`has_text_arguments`).
    """
    return [_plain(message, has_text_arguments) for message in messages]


def _plain(message: ChatMessage, has_text_arguments: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thought is not None and role == "assistant":
        plain["reasoning_content"] = plain["reasoning"] = plain["thinking"] = thought
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments or "", has_text_arguments),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _content(message: ChatMessage) -> str | list[Any]:
    """Returns the content for the template. A refusal becomes the text of the earlier answer."""
    content = message.content
    if message.is_answer and isinstance(content, list):
        return [_said(part) for part in content]
    if message.is_answer and content is None:
        return message.refusal or ""
    return content or ""


def _said(part: Any) -> Any:
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


def _arguments(text: str, has_text_arguments: bool) -> Any:
    """Returns the arguments of a call as an object. If the model wrote invalid JSON, the template
    gets text."""
    if has_text_arguments:
        return text
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _check_options(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if len(value) > MAX_OPTIONS:
        _refuse(f"must hold at most {MAX_OPTIONS} entries, got {len(value)}")
    for name, option in value.items():
        shown = str(name)[:64]
        is_name = isinstance(name, str) and name.isidentifier() and len(name) <= 64
        if not is_name or name in _RESERVED or name.startswith("_"):
            _refuse(f"must not set '{shown}'")
        if not (option is None or isinstance(option, str | int | float | bool)):
            _refuse(f"'{shown}' must be a string, a number, true, false or null")
        if isinstance(option, str) and len(option) > MAX_OPTION_CHARS:
            _refuse(f"'{shown}' must have at most {MAX_OPTION_CHARS} characters, got {len(option)}")
        if isinstance(option, int) and option.bit_length() > 63:
            _refuse(f"'{shown}' must fit into 64 bits")
    return value


def _refuse(reason: str) -> None:
    raise PydanticCustomError("template_option", "{reason}", {"reason": reason})


_OPTIONS_SCHEMA = {
    "type": "object",
    "maxProperties": MAX_OPTIONS,
    "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
}
TemplateOptions = Annotated[
    dict[str, Any], BeforeValidator(_check_options), WithJsonSchema(_OPTIONS_SCHEMA)
]


def template_options(
    options: Mapping[str, Any] | None, effort: ReasoningEffort | None
) -> dict[str, Any]:
    """Returns the options that the template sees. Effort "none" switches reasoning off where it is
    a switch."""
    if effort is None:
        return dict(options or {})
    switches = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **switches, **(options or {})}
