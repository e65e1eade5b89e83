"""Earlier answers that clients send back, and fields that a forced call overrides: a scripted
model."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import pytest
from starlette.testclient import TestClient

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER: Any = {"role": "user", "content": "hi"}
FUNCTION: Any = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL: Any = {"type": "function", "function": FUNCTION}
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def served(start_served_once: Any) -> Any:
    return start_served_once(TEMPLATE)


def prompt_of(served: Any) -> str:
    engine = served[1]
    text: str = engine.tokenizer.decode(engine.submitted[-1].prompt_token_ids)
    return text


def call(**more: Any) -> dict[str, Any]:
    """Returns a call as LiteLLM and the OpenAI library keep it, with `more` fields."""
    function = {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}
    return {"id": "call_1", "type": "function", "function": function, "index": 0, **more}


@pytest.mark.parametrize(
    ("message", "seen"),
    [
        ({"content": "x", "parsed": {"a": 1}, "audio": None, "function_call": None}, "x"),
        ({"content": "x", "refusal": None, "annotations": [], "tool_calls": None}, "x"),
        ({"content": "x", "provider_specific_fields": {"b": 2}, "tool_calls": []}, "x"),
        ({"content": "x", "thinking_blocks": [{"type": "thinking"}], "reasoning": "y"}, "x(y)"),
        ({"content": None, "tool_calls": [call(provider_specific_fields={})]}, "<tool_call>"),
        ({"content": "", "tool_calls": [call(function={"name": "f", "arguments": None})]}, "{}"),
        ({"content": None, "reasoning_content": "y", "refusal": None}, "(y)"),
        ({"content": None, "refusal": None, "tool_calls": []}, "<assistant><user>"),
        ({"refusal": "I will not"}, "<assistant>I will not"),
        ({"content": None, "refusal": "I will not"}, "<assistant>I will not"),
        ({"content": [{"type": "refusal", "refusal": "Not I"}]}, "<assistant>Not I"),
        ({"content": [{"type": "text", "text": "x", "parsed": {}, "phase": "final"}]}, "x"),
        ({"content": "x", "a_field_of_next_year": 1, "cache_control": {}}, "x"),
    ],
)
def test_an_earlier_answer_of_a_chat(served: Any, message: dict[str, Any], seen: str) -> None:
    messages = [USER, {"role": "assistant", **message}, USER]
    response = served[0].post("/v1/chat/completions", json={"messages": messages, "tools": [TOOL]})
    assert response.status_code == 200, response.text
    assert seen in prompt_of(served)


def test_its_fields_without_effect_are_named(served: Any) -> None:
    message = {"role": "assistant", "content": "x", "parsed": {}, "tool_calls": [call()]}
    response = served[0].post("/v1/chat/completions", json={"messages": [USER, message]})
    at = "messages.1.tool_calls.0"
    names = f"messages.1.parsed, {at}.function.parsed_arguments, {at}.index"
    assert response.headers["x-ignored-parameters"] == names


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_other_roles_stay_strict(served: Any, role: str) -> None:
    message = {"role": role, "content": "x", "parsed": {}}
    response = served[0].post("/v1/chat/completions", json={"messages": [USER, message]})
    assert response.json()["error"]["code"] == "unknown_parameter"


@pytest.mark.parametrize("field", ["audio", "function_call"])
def test_what_would_be_lost_is_refused_by_name(served: Any, field: str) -> None:
    message = {"role": "assistant", "content": "x", field: {"id": "1", "name": "f"}}
    response = served[0].post("/v1/chat/completions", json={"messages": [message, USER]})
    assert response.status_code == 400
    assert f"messages.0.{field} is not supported" in response.json()["error"]["message"]


OUTPUT: Any = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "status": None, "x": 1},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "phase": None,
        "parsed": None,
        "content": [
            {"type": "output_text", "text": "said", "annotations": [], "logprobs": [], "parsed": {}}
        ],
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "f",
        "arguments": "{}",
        "parsed_arguments": {},
        "caller": None,
        "namespace": None,
        "status": "completed",
        "provider_specific_fields": None,
    },
    {"type": "function_call_output", "call_id": "call_1", "output": "3", "created_by": "me"},
]


def test_earlier_output_of_responses(served: Any) -> None:
    response = served[0].post("/v1/responses", json={"input": [USER, *OUTPUT, USER]})
    assert response.status_code == 200, response.text
    assert "<assistant>said<tool_call>{}<tool>3" in prompt_of(served)
    named = response.headers["x-ignored-parameters"].split(", ")
    assert {"input.1.x", "input.3.parsed_arguments"} <= set(named)
    strict = served[0].post("/v1/responses", json={"input": [{**USER, "parsed": {}}]})
    assert strict.json()["error"]["code"] == "unknown_parameter"


BLOCKS: Any = [
    {"type": "thinking", "thinking": "hm", "signature": "c2ln", "x": 1},
    {"type": "redacted_thinking", "data": "c2ln"},
    {"type": "text", "text": "said", "citations": None, "parsed_output": {}, "y": 1},
    {
        "type": "tool_use",
        "id": "call_1",
        "name": "f",
        "input": {},
        "caller": {"type": "direct"},
        "toolset_name": None,
    },
]
RESULT: Any = {"type": "tool_result", "tool_use_id": "call_1", "content": "3"}


def test_earlier_content_of_messages(served: Any) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": BLOCKS, "stop_reason": "tool_use"},
        {"role": "user", "content": [RESULT]},
    ]
    body = {"messages": messages, "max_tokens": 5}
    response = served[0].post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert "<assistant>said(hm)<tool_call>{}<tool>3" in prompt_of(served)
    strict = {"role": "user", "content": [{**RESULT, "x": 1}]}
    answer = served[0].post("/v1/messages", json={**body, "messages": [*messages[:2], strict]})
    assert "Unknown parameter" in answer.json()["error"]["message"]


FORCED: Any = {
    "/v1/chat/completions": {
        "messages": [USER],
        "tools": [TOOL],
        "tool_choice": "required",
        "response_format": FORMAT,
    },
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "messages": [USER],
        "max_tokens": 100,
        "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
        "tool_choice": {"type": "any"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}
NAMES = {
    "/v1/chat/completions": "response_format",
    "/v1/responses": "text.format",
    "/v1/messages": "output_config.format",
}


@pytest.mark.parametrize("path", FORCED)
def test_a_forced_call_displaces_the_format(served: Any, path: str) -> None:
    client, engine = served
    engine.script = lambda request: '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    response = client.post(path, json=FORCED[path])
    assert response.status_code == 200, response.text
    constraint = engine.submitted[-1].rules.constraint
    assert constraint.kind == "lark" and "call_0" in constraint.source
    assert '"arguments"' in response.text or '"tool_use"' in response.text
    assert NAMES[path] in response.headers["x-ignored-parameters"]


def test_a_displaced_format_is_checked_all_the_same(served: Any) -> None:
    body = {**FORCED["/v1/chat/completions"], "response_format": {"type": "json_schema"}}
    assert served[0].post("/v1/chat/completions", json=body).status_code == 400
    body = {**FORCED["/v1/chat/completions"], "response_format": None, "guided_regex": "a"}
    refused = served[0].post("/v1/chat/completions", json=body).json()["error"]
    assert refused["param"] == "tool_choice"


# As LiteLLM and others tell this error from the rest.
OPENAI_WORDS = re.compile(
    r"This model's maximum context length is (\d+) tokens\. However, you requested (\d+) tokens "
    r"\((\d+) in (?:the )?([a-z.0-9]+), (\d+) in the completion\)"
)


@pytest.mark.parametrize(
    ("path", "fields", "place", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 5000}, "messages", None),
        ("/v1/chat/completions", {"messages": "long"}, "messages", "messages"),
        ("/v1/chat/completions", {"messages": "long", "max_tokens": 7}, "messages", "messages"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 5000}, "prompt", None),
        ("/v1/completions", {"prompt": [1] * 600, "max_tokens": 7}, "prompt", "prompt"),
        ("/v1/completions", {"prompt": ["a", "b" * 600]}, "prompt.1", "prompt.1"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 5000}, "input", None),
        ("/v1/responses", {"input": "a" * 600}, "input", "input"),
    ],
)
def test_a_context_that_is_too_small(
    client: TestClient, path: str, fields: dict[str, Any], place: str, param: str | None
) -> None:
    if fields.get("messages") == "long":
        fields = {**fields, "messages": [{"role": "user", "content": "a" * 600}]}
    error = client.post(path, json=fields).json()["error"]
    assert error["code"] == "context_length_exceeded"
    found = OPENAI_WORDS.match(error["message"])
    assert found is not None, error["message"]
    limit, requested, in_prompt, asked = (int(found[i]) for i in (1, 2, 3, 5))
    assert limit == 512 and requested == in_prompt + asked > limit
    assert found[4] == place
    assert error["param"] == (param or next(name for name in fields if "tokens" in name))


@pytest.mark.parametrize("route", ["", "/count_tokens"])
@pytest.mark.parametrize("num_chars", [600, 100_000])
def test_a_context_that_is_too_small_for_a_message(
    client: TestClient, route: str, num_chars: int
) -> None:
    """The second text is not tokenized at all."""
    body: Any = {"messages": [{"role": "user", "content": "a" * num_chars}]}
    if not route:
        body["max_tokens"] = 5
    response = client.post(f"/v1/messages{route}", json=body)
    if route and num_chars == 600:
        assert response.json()["input_tokens"] > 600
        return
    message = response.json()["error"]["message"]
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", message)
    assert found is not None, message
    assert int(found[1]) > int(found[2]) == 511


def test_a_long_text_is_refused_in_the_same_words(client: TestClient) -> None:
    error = client.post("/v1/completions", json={"prompt": "a" * 100_000}).json()["error"]
    assert error["message"].startswith("This model's maximum context length is 512 tokens. ")


@pytest.fixture
def thinking(start_served: Any, serve_live: Any) -> Any:
    """A client of a model that reasons, and its engine."""
    test_client, engine = start_served(TEMPLATE + "{# </think> #}")
    engine.script = lambda request: "<think>Well, well.</think>Hello"
    with (
        serve_live(test_client.app, engine) as live,
        anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0) as client,
    ):
        yield client, (test_client, engine)


def test_thinking_is_signed_and_goes_back(thinking: Any) -> None:
    client, served = thinking
    fields: Any = {"model": "tiny", "max_tokens": 100, "messages": [USER]}
    with client.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds.count("signature") == 1 and kinds.index("signature") < kinds.index("text")
    whole = client.messages.create(**fields)
    thought, said = whole.content
    assert (thought.type, thought.thinking, said.text) == ("thinking", "Well, well.", "Hello")
    assert thought.signature
    assert [block.model_dump() for block in streamed.content] == [
        block.model_dump() for block in whole.content
    ]
    fields["messages"] = [USER, {"role": "assistant", "content": streamed.content}, USER]
    answer = client.messages.with_raw_response.create(**fields)
    assert "signature" not in answer.headers.get("x-ignored-parameters", "")
    assert "<assistant>Hello(Well, well.)<user>hi" in prompt_of(served)
