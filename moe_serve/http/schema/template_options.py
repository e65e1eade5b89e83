"""Options that a request may pass to the chat template beside messages and tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

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
    """The options that the template sees. Effort "none" switches reasoning off where it is a
    switch."""
    if effort is None:
        return dict(options or {})
    switches = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **switches, **(options or {})}
