"""Converts Anthropic's tools and the choice among them to those of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_serve.errors import InvalidRequestError
from moe_serve.http.schema.parameters import check_fields

_FIELDS = ("type", "name", "description", "input_schema", "strict")
_IGNORED = frozenset(
    {
        "allowed_callers",
        "cache_control",
        "defer_loading",
        "eager_input_streaming",
        "input_examples",
    }
)
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: Sequence[Any], *, is_strict: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns `tools` in the form of a chat, and the names of the fields without effect."""
    converted: list[dict[str, Any]] = []
    ignored: list[str] = []
    for i, tool in enumerate(tools):
        param = f"tools.{i}"
        if not isinstance(tool, dict):
            raise InvalidRequestError(
                f"{param} must be an object.", param=param, code="invalid_type"
            )
        if tool.get("type") not in (None, "custom"):
            raise InvalidRequestError(
                f"{param}.type must be 'custom' or left out, because the server does not run "
                "tools itself.",
                param=f"{param}.type",
                code="unsupported_parameter",
            )
        for name in ("name", "input_schema"):
            if tool.get(name) is None:
                raise InvalidRequestError(
                    f"{param}.{name} is missing.",
                    param=f"{param}.{name}",
                    code="missing_required_parameter",
                )
        extras = {name: value for name, value in tool.items() if name not in _FIELDS}
        ignored += check_fields(extras, _IGNORED, {}, f"{param}.", is_strict)
        converted.append({"type": "function", "function": _function(tool)})
    return converted, ignored


def chat_tool_choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """Returns `tool_choice` in the form of a chat, and whether an answer may have several calls."""
    if choice is None:
        return None, None
    kind = choice.get("type")
    is_single = choice.get("disable_parallel_tool_use")
    if not (is_single is None or isinstance(is_single, bool)):
        param = "tool_choice.disable_parallel_tool_use"
        message = f"{param} must be true or false."
        raise InvalidRequestError(message, param=param, code="invalid_type")
    is_parallel = None if is_single is None else not is_single
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}, is_parallel
    if isinstance(kind, str) and kind in _CHOICES:
        return _CHOICES[kind], is_parallel
    raise InvalidRequestError(
        "tool_choice.type must be auto, any, none, or tool with a name.", param="tool_choice.type"
    )


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return function
