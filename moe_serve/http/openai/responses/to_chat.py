"""Converts a request for a response, and the items before it, to a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_serve.errors import InvalidRequestError
from moe_serve.http.generation.chat import AnswerOptions, Chat
from moe_serve.http.generation.chat_fields import ChatFields, extensions, renamed_fields
from moe_serve.http.openai.responses.body import ResponsesBody
from moe_serve.http.openai.responses.input_items import Item, chat_messages, input_items
from moe_serve.http.openai.responses.tools import chat_response_format, chat_tool_choice, chat_tools
from moe_serve.http.schema.strict_schema import parse_body

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
            max_tokens_field="max_output_tokens", is_streamed=self.body.stream
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
