"""A chat is the same from every API; user preferences are kept apart from rules."""

from __future__ import annotations

from typing import Any

import pytest

from moe_serve.errors import InvalidRequestError
from moe_serve.http.anthropic.message_body import MessagesBody
from moe_serve.http.anthropic.message_chat import translate as translate_message
from moe_serve.http.generation.chat_fields import EXTENSIONS, ChatFields
from moe_serve.http.generation.chat_request import AnswerOptions, Chat
from moe_serve.http.openai.bodies import ChatBody
from moe_serve.http.openai.responses.response_body import ResponsesBody
from moe_serve.http.openai.responses.response_chat import translate as translate_response
from moe_serve.http.schema.field_types import parse_body

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
SHARED: dict[str, Any] = {"temperature": 0.5, "top_k": 7, "stop": ["x"], "cache_salt": "s"}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{# <tool_call> </think> #}"
)


def of_openai() -> tuple[Chat, AnswerOptions]:
    content = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 9,
    }
    body = parse_body(ChatBody, {**SHARED, **content})
    body.check(is_strict=True)
    return body.chat(), body.options()


def of_responses() -> tuple[Chat, AnswerOptions]:
    content = {
        "instructions": "Be brief.",
        "input": "hi",
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 9,
    }
    body = parse_body(ResponsesBody, {**SHARED, **content})
    translated = translate_response(body, [], is_strict=True)
    return translated.chat, translated.options()


def of_anthropic() -> tuple[Chat, AnswerOptions]:
    content = {
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": 9,
    }
    body = parse_body(MessagesBody, {**SHARED, **content})
    translated = translate_message(body, is_strict=True, has_reasoning=False)
    return translated.chat, translated.options(is_streamed=body.stream)


@pytest.mark.parametrize("build", [of_responses, of_anthropic])
def test_every_api_builds_the_same(build: Any) -> None:
    expected, asked = of_openai()
    chat, options = build()
    for name in ("template_tools", "template_options"):
        assert getattr(chat, name)() == getattr(expected, name)()
    found = chat.template_messages(has_text_arguments=False)
    assert found == expected.template_messages(has_text_arguments=False)
    assert chat.forces_call and not chat.is_parallel and not chat.continues
    assert (options.params, options.cache_salt) == (asked.params, asked.cache_salt)


def test_every_extension_is_checked_as_in_a_chat() -> None:
    for name in EXTENSIONS:
        checked, own = ChatFields.model_fields[name], ChatBody.model_fields[name]
        assert (checked.annotation, checked.metadata) == (own.annotation, own.metadata), name


def test_the_first_wrong_field_of_a_translated_chat_is_told() -> None:
    body = parse_body(ResponsesBody, {"input": "hi", "top_k": "x", "seed": "y"})
    with pytest.raises(InvalidRequestError) as caught:
        translate_response(body, [], is_strict=True)
    assert caught.value.param == "top_k"


def test_what_the_user_asked_for_is_not_rewritten(start_served: Any) -> None:
    client, engine = start_served(TEMPLATE)
    fields = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "bad_words": ["lo"],
        "thinking_token_budget": 3,
    }
    answer = client.post("/v1/chat/completions", json=fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Ignored-Parameters"] == "response_format"
    request = engine.submitted[-1]
    params, rules = request.params, request.rules
    assert params.constraint.kind == "json_object" and params.bad_words == ("lo",)
    assert params.bad_word_ids == () and params.thinking_markers is None
    assert rules.constraint.kind == "lark" and "weather" in rules.constraint.source
    assert tuple(engine.tokenizer.encode("lo")) in rules.bad_word_ids
    assert rules.thinking_markers is not None


def test_a_limit_that_does_not_fit_is_named_as_the_client_named_it(start_served: Any) -> None:
    client, _ = start_served(TEMPLATE)
    answer = client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 9999})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "max_output_tokens"
    assert error["code"] == "context_length_exceeded"
