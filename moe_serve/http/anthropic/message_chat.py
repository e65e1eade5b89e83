"""Converts a body of /v1/messages to a chat, with its tools and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_serve.errors import InvalidRequestError
from moe_serve.http.anthropic.message_body import CountTokensBody, MessagesBody
from moe_serve.http.anthropic.message_content import ContentReader
from moe_serve.http.generation.chat_fields import ChatFields, extensions, renamed_fields
from moe_serve.http.generation.chat_request import AnswerOptions, Chat
from moe_serve.http.schema.field_types import parse_body
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
_STANDARD_ONLY = "standard_only"  # Anthropic's name of the default tier
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


# The names of a chat's fields, and the client's names for them.
OWN_NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "function.name": "name",
    "function.parameters": "input_schema",
}
OWN_IGNORED: Mapping[str, str] = {
    **OWN_NAMES,
    "reasoning_content": "thinking",
    "chat_template_kwargs.enable_thinking": "thinking",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedMessages:
    """A translated request. `ignored` names the fields without effect."""

    fields: ChatFields
    chat: Chat
    ignored: tuple[str, ...]
    user: object = None  # `metadata.user_id`

    def options(self, *, is_streamed: bool | None) -> AnswerOptions:
        options = self.fields.options(max_tokens_field="max_tokens", is_streamed=is_streamed)
        tier = "default" if options.wish.tier == _STANDARD_ONLY else options.wish.tier
        wish = replace(options.wish, tier=tier, user=self.user, user_field="metadata.user_id")
        return replace(options, wish=wish)


def translate(body: CountTokensBody, *, is_strict: bool, has_reasoning: bool) -> TranslatedMessages:
    """Converts the request to a chat.

    `has_reasoning`: the markers of the model's reasoning are known. Clients send a reasoning budget
    to any model.
    """
    ignored = body.check(is_strict=is_strict, has_reasoning=has_reasoning)
    reader = ContentReader(is_strict=is_strict)
    messages = [*reader.system(body.system), *reader.messages(body.messages)]
    if len(messages) > 1 and messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()  # the start of an answer that is still empty
    tools, of_tools = chat_tools(body.tools or [], is_strict=is_strict)
    choice, is_parallel = _tool_choice(body, tools)
    content = {**extensions(body.model_extra), **_sampling(body), "messages": messages}
    content |= {"tools": tools or None, "tool_choice": choice} | _output_fields(body)
    continues = _has_prefill(messages, f"messages.{len(body.messages) - 1}")
    content |= _thinking_fields(body, content.get("chat_template_kwargs"))
    if has_reasoning and body.thinking_token_budget is not None:
        content |= _budget_field(body.thinking_token_budget, content)
    with renamed_fields(OWN_NAMES):
        fields = parse_body(ChatFields, {k: v for k, v in content.items() if v is not None})
        chat = fields.chat(is_parallel=is_parallel, continues=continues)
    ignored += [*reader.ignored, *of_tools]
    metadata = (body.model_extra or {}).get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    return TranslatedMessages(fields=fields, chat=chat, ignored=tuple(ignored), user=user)


def _sampling(body: CountTokensBody) -> dict[str, Any]:
    if not isinstance(body, MessagesBody):
        return {}
    fields: dict[str, Any] = {"max_tokens": body.max_tokens}
    fields |= {"temperature": body.temperature, "top_p": body.top_p}
    if body.stop_sequences:
        if "stop" in extensions(body.model_extra):
            message = "stop and stop_sequences have the same meaning: send only one."
            raise InvalidRequestError(message, param="stop_sequences")
        fields["stop"] = body.stop_sequences
    return fields


def _tool_choice(
    body: CountTokensBody, tools: Sequence[Mapping[str, Any]]
) -> tuple[Any, bool | None]:
    """Returns `tool_choice` in the form of a chat, and whether an answer may have several calls."""
    choice, is_parallel = chat_tool_choice(body.tool_choice)
    if tools:
        return choice, is_parallel
    if choice not in (None, "none", "auto"):
        raise InvalidRequestError(
            "tool_choice requires at least one function in tools.", param="tool_choice"
        )
    return None, None


def _output_fields(body: CountTokensBody) -> dict[str, Any]:
    config = body.output_config
    if config is None:
        return {}
    fields: dict[str, Any] = {"reasoning_effort": config.effort}
    if config.format is not None:
        if config.format.get("type") != "json_schema":
            param = "output_config.format.type"
            raise InvalidRequestError(f"{param} must be json_schema.", param=param)
        schema = {"name": "output", "schema": config.format.get("schema"), "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _thinking_fields(body: CountTokensBody, kwargs: Any) -> dict[str, Any]:
    """Passes `enable_thinking` to the chat template, which knows it if thinking is optional."""
    if body.thinking is None or not (kwargs is None or isinstance(kwargs, dict)):
        return {}
    is_on = body.thinking.type != "disabled"
    return {"chat_template_kwargs": {"enable_thinking": is_on, **(kwargs or {})}}


def _budget_field(budget: int, content: Mapping[str, Any]) -> dict[str, Any]:
    name = "thinking_token_budget"
    if name in content:
        param = "thinking.budget_tokens"
        raise InvalidRequestError(
            f"{name} and {param} have the same meaning: send only one.", param=param
        )
    return {name: budget}


def _has_prefill(messages: Sequence[Mapping[str, Any]], param: str) -> bool:
    """Returns True if the conversation ends with text of the assistant, which the answer
    continues."""
    last = messages[-1]
    if last["role"] != "assistant":
        return False
    if "tool_calls" in last:
        message = f"{param} ends with tool_use: send its tool_result in a user message."
        raise InvalidRequestError(message, param=param)
    if not last["content"]:
        message = f"{param} has no text to continue."
        raise InvalidRequestError(message, param=param)
    return True
