"""Converts a request for a response, with its tools and the items before it, to a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_serve.errors import InvalidRequestError
from moe_serve.http.generation.chat_fields import ChatFields, extensions, renamed_fields
from moe_serve.http.generation.chat_request import AnswerOptions, Chat
from moe_serve.http.openai.responses.input_items import Item, chat_messages, input_items
from moe_serve.http.openai.responses.response_body import FORMAT_FIELDS, ResponsesBody
from moe_serve.http.schema.field_types import parse_body
from moe_serve.http.schema.parameters import check_fields

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
# Known fields without meaning for functions that the client runs.
_IGNORED_FUNCTION_FIELDS = frozenset({"allowed_callers", "defer_loading", "output_schema"})
_CHOICES = ("none", "auto", "required")


def chat_tools(tools: Sequence[Any], *, is_strict: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns `tools` in the form of a chat, and the names of the fields without effect."""
    converted: list[dict[str, Any]] = []
    ignored: list[str] = []
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            shown = f", got {kind[:40]!r}" if isinstance(kind, str) else ""
            raise InvalidRequestError(
                f"tools.{i}.type must be 'function', because the server does not run tools "
                f"itself{shown}.",
                param=f"tools.{i}.type",
                code="unsupported_parameter" if isinstance(kind, str) else "invalid_value",
            )
        known = {"type", *_FUNCTION_FIELDS}
        extras = {name: value for name, value in tool.items() if name not in known}
        ignored += check_fields(extras, _IGNORED_FUNCTION_FIELDS, {}, f"tools.{i}.", is_strict)
        function = {name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}
        converted.append({"type": "function", "function": function})
    return converted, ignored


def chat_tool_choice(
    choice: Any, tools: Sequence[Mapping[str, Any]]
) -> tuple[Any, list[Mapping[str, Any]]]:
    """Returns `tool_choice` in the form of a chat, and the tools that it allows."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = choice.get("name")
        return {"type": "function", "function": {"name": name}}, list(tools)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed_tools(choice, tools)
    if choice is None or choice in _CHOICES:
        return choice, list(tools)
    raise InvalidRequestError(
        f"tool_choice must be one of {', '.join(_CHOICES)}, "
        '{"type": "function", "name": ...} or {"type": "allowed_tools", ...}.',
        param="tool_choice",
    )


def _allowed_tools(
    choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[Any, list[Mapping[str, Any]]]:
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(allowed, list):
        raise InvalidRequestError(
            "tool_choice of type allowed_tools requires mode 'auto' or 'required' and a list "
            "tools.",
            param="tool_choice",
        )
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in allowed]
    left = [tool for tool in tools if tool["function"].get("name") in names]
    if not left:
        raise InvalidRequestError(
            "tool_choice.tools names none of the functions in tools.", param="tool_choice.tools"
        )
    return mode, left


def chat_response_format(text_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Converts `text.format` to the `response_format` of a chat; None: any text."""
    if text_format is None:
        return None
    kind = text_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema":
        names = FORMAT_FIELDS[kind] - {"type"}
        schema = {name: value for name, value in text_format.items() if name in names}
        return {"type": "json_schema", "json_schema": schema}
    raise InvalidRequestError(
        "text.format.type must be text, json_object or json_schema.", param="text.format.type"
    )


# The names of a chat's fields, and the client's names for them.
OWN_NAMES: Mapping[str, str] = {
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "function.name": "name",
    "function.parameters": "parameters",
}
OWN_IGNORED: Mapping[str, str] = {**OWN_NAMES, "reasoning_content": "reasoning"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedRequest:
    """A translated request. `items` are its own, with ids; `ignored` names fields without
    effect."""

    body: ResponsesBody
    fields: ChatFields
    chat: Chat
    items: tuple[Item, ...]
    ignored: tuple[str, ...]

    def options(self) -> AnswerOptions:
        return self.fields.options(
            max_tokens_field="max_output_tokens",
            is_streamed=self.body.stream,
            user=(self.body.model_extra or {}).get("user"),
        )


def translate(
    body: ResponsesBody, history: Sequence[Item], *, is_strict: bool
) -> TranslatedRequest:
    """Converts the request to a chat. `history` has the items before those of the request."""
    ignored = body.check(is_strict=is_strict)
    items, of_items = input_items(body.input, is_strict=is_strict)
    content, of_tools = _chat_content(body, [*history, *items], is_strict=is_strict)
    with renamed_fields(OWN_NAMES):
        fields = parse_body(ChatFields, content)
        chat = fields.chat(is_parallel=body.parallel_tool_calls)
    return TranslatedRequest(
        body=body,
        fields=fields,
        chat=chat,
        items=tuple(items),
        ignored=(*ignored, *of_items, *of_tools),
    )


def _chat_content(
    body: ResponsesBody, items: Sequence[Item], *, is_strict: bool
) -> tuple[dict[str, Any], list[str]]:
    messages = chat_messages(items)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    tools, ignored = chat_tools(body.tools or [], is_strict=is_strict)
    choice, allowed = chat_tool_choice(body.tool_choice, tools)
    content: dict[str, Any] = {
        **extensions(body.model_extra),
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "response_format": chat_response_format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
    }
    if body.has_logprobs:
        content["top_logprobs"] = body.top_logprobs or 0
    if allowed:
        content |= {"tools": allowed, "tool_choice": choice}
    elif choice not in (None, "none", "auto"):
        raise InvalidRequestError(
            "tool_choice requires at least one function in tools.", param="tool_choice"
        )
    return {name: value for name, value in content.items() if value is not None}, ignored
