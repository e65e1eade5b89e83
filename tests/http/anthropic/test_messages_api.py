"""POST /v1/messages and count_tokens on the scripted engine, in Anthropic's shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from moe_serve.errors import InvalidRequestError
from moe_serve.http.anthropic.message_chat import chat_tool_choice, chat_tools
from moe_serve.http.anthropic.message_content import ContentReader
from moe_serve.http.anthropic.message_routes import ContentBlocks, call_input
from moe_serve.text.assistant.outbox import AssistantDelta, CallDelta

PATH = "/v1/messages"
HI: dict[str, Any] = {"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def create(client: TestClient, **fields: Any) -> Message:
    response = client.post(PATH, json={**HI, **fields})
    assert response.status_code == 200, response.text
    return Message.model_validate(response.json())


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(PATH, json={**HI, "stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def prompt_of(engine: Any) -> str:
    text: str = engine.tokenizer.decode(engine.submitted[-1].prompt_token_ids)
    return text


def test_an_answer(client: TestClient, engine: Any) -> None:
    message = create(client, model="tiny", system="Be brief.", temperature=0.5, top_k=7)
    assert message.content[0].type == "text" and message.content[0].text == "Hello"
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    prompt = "<system>Be brief.\n<user>hi\n<assistant>"
    assert prompt_of(engine) == prompt
    assert message.usage.input_tokens == len(prompt) - 3
    assert message.usage.cache_read_input_tokens == 3 and message.usage.output_tokens == 6
    params = engine.submitted[0].params
    assert (params.max_tokens, params.temperature, params.top_k) == (50, 0.5, 7)


@pytest.mark.parametrize("empty", ["", []])
def test_what_is_empty_at_either_end_is_not_there(
    client: TestClient, engine: Any, empty: str | list[Any]
) -> None:
    messages = [*HI["messages"], {"role": "assistant", "content": empty}]
    create(client, messages=messages, system=empty)
    assert prompt_of(engine) == "<user>hi\n<assistant>"


def test_why_an_answer_ends(client: TestClient, engine: Any) -> None:
    assert create(client, max_tokens=2).stop_reason == "max_tokens"
    stopped = create(client, stop_sequences=["ll"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "ll")
    assert stopped.content[0].text == "He"  # type: ignore[union-attr]
    engine.script = lambda request: "x" * 1000
    assert create(client, max_tokens=100_000).stop_reason == "model_context_window_exceeded"


def test_the_events_of_a_stream(client: TestClient) -> None:
    events = stream(client)
    for event in events:
        assert EVENTS.validate_python(event).type == event["type"]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == (
        "Hello"
    )
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 6
    assert events[0]["message"]["content"] == []


def test_blocks_become_messages() -> None:
    reader = ContentReader(is_strict=True)
    text = {"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [text], "is_error": False}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [text]},
        {"role": "assistant", "content": [thinking, text, use]},
        {"role": "user", "content": [result, text]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c2"}]},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert reader.messages(messages) == [
        {"role": "user", "content": "a\nt"},
        {
            "role": "assistant",
            "content": "t",
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "t"},
        {"role": "user", "content": "t"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
    ]
    assert set(reader.ignored) == {"cache_control"}


def test_blocks_of_the_answer_as_the_official_types_know_them() -> None:
    content, events = ContentBlocks(), []
    events += content.push(AssistantDelta(reasoning="h"))
    events += content.push(AssistantDelta(reasoning="m", content="t"))
    first = CallDelta(index=0, id="c0", name="f", arguments='{"a":')
    second = CallDelta(index=1, id="c1", name="g")
    events += content.push(AssistantDelta(calls=(first, CallDelta(index=0, arguments="1}"))))
    events += content.push(AssistantDelta(calls=(second,)))
    events += content.finish()
    for event in events:
        assert EVENTS.validate_python(event).type == event["type"]
    signature = content.blocks[0]["signature"]
    assert signature, "some clients drop thinking without one"
    assert [e["delta"] for e in events if "signature_delta" in str(e)] == [
        {"type": "signature_delta", "signature": signature}
    ]
    assert events[3]["delta"]["type"] == "signature_delta", "the last one of its block"
    assert content.blocks == [
        {"type": "thinking", "thinking": "hm", "signature": signature},
        {"type": "text", "text": "t"},
        {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "c1", "name": "g", "input": {}},
    ]
    indexes = [event["index"] for event in events]
    assert indexes == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3]


def test_the_rest_of_a_call_and_what_follows_it_may_come_together() -> None:
    content = ContentBlocks()
    content.push(AssistantDelta(calls=(CallDelta(index=0, id="c0", name="f", arguments='{"a"'),)))
    content.push(AssistantDelta(content="t", calls=(CallDelta(index=0, arguments=":1}"),)))
    content.finish()
    assert content.blocks == [
        {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1}},
        {"type": "text", "text": "t"},
    ]


def test_arguments_that_were_cut_are_shown_as_they_are() -> None:
    assert call_input('{"a": 1') == {"_raw": '{"a": 1'}
    assert call_input("[1]") == {"_raw": "[1]"}
    assert call_input("") == {}
    endless = '{"a": ' + "[" * 100_000
    assert call_input(endless) == {"_raw": endless}, "a model that repeats itself"


def test_tools_and_choices() -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "type": "custom"}
    tools, ignored = chat_tools([{**tool, "cache_control": {}}], is_strict=True)
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert tools == [{"type": "function", "function": function}]
    assert ignored == ["tools.0.cache_control"]
    assert chat_tool_choice({"type": "any", "disable_parallel_tool_use": True}) == (
        "required",
        False,
    )
    named = {"type": "function", "function": {"name": "f"}}
    assert chat_tool_choice({"type": "tool", "name": "f"}) == (named, None)
    for wrong in ({"type": "tool"}, {"type": "some"}, {}):
        with pytest.raises(InvalidRequestError, match="tool_choice"):
            chat_tool_choice(wrong)


def test_count_tokens(client: TestClient, engine: Any) -> None:
    body = {"model": "tiny", "messages": HI["messages"], "system": [{"type": "text", "text": "s"}]}
    response = client.post(f"{PATH}/count_tokens", json=body)
    assert response.json() == {"input_tokens": len("<system>s\n<user>hi\n<assistant>")}
    assert not engine.submitted


IMAGE = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
CALLED = [*HI["messages"], {"role": "assistant", "content": [CALL]}]
THINKING = {"type": "thinking", "thinking": "hm", "signature": ""}
THOUGHT = [*HI["messages"], {"role": "assistant", "content": [THINKING]}]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"messages": []}, "messages must hold 1 to"),
        ({"messages": [3]}, "messages.0 must be an object"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role must be one of"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        ({"messages": IMAGE}, "messages.0.content.0.type must be one of text, tool_result"),
        ({"system": 3}, "system must be a string or a list of blocks"),
        ({"temperature": 3.0}, "temperature must be"),
        ({"stop_sequences": [""]}, "stop"),
        ({"colour": "red"}, "Unknown parameter 'colour'"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type must be 'custom'"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema is missing"),
        ({"tool_choice": {"type": "any"}}, "tool_choice requires at least one function"),
        ({"thinking": {"type": "often"}}, "thinking.type must be"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be"),
        ({"messages": [{"role": "user", "content": "a" * 4000}]}, "prompt is too long: 574 "),
        ({"stop_sequences": ["a"], "stop": ["b"]}, "send only one"),
        ({"tool_choice": {"type": "auto", "x": 1}}, "Unknown parameter 'tool_choice.x'"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "no"}},
            "disable_parallel_tool_use must be true or false",
        ),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is"),
        ({"messages": CALLED}, "messages.1 ends with tool_use"),
        ({"messages": THOUGHT}, "messages.1 has no text"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}, "x": 1}}},
            "Unknown parameter 'output_config.format.x'",
        ),
    ],
)
def test_what_is_refused(client: TestClient, fields: dict[str, Any], words: str) -> None:
    response = client.post(PATH, json={**HI, **fields})
    assert response.status_code == 400, response.text
    content = response.json()
    assert content["type"] == "error" and content["error"]["type"] == "invalid_request_error"
    assert words in content["error"]["message"], content


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "kind"),
    [
        ("POST", PATH, {"json": {**HI, "model": "other"}}, 404, "not_found_error"),
        ("POST", PATH + "/batches", {"json": {}}, 404, "not_found_error"),
        ("GET", PATH, {}, 405, "invalid_request_error"),
        ("POST", PATH, {"content": b"{"}, 415, "invalid_request_error"),
        ("POST", PATH, {"json": "x" * 5_000_000}, 413, "request_too_large"),
    ],
)
def test_errors_have_the_envelope_of_this_api(
    client: TestClient, method: str, path: str, options: dict[str, Any], status: int, kind: str
) -> None:
    response = client.request(method, path, **options)
    assert response.status_code == status, response.text
    assert response.json()["type"] == "error" and response.json()["error"]["type"] == kind


def test_the_engine_s_errors_have_it_too(client: TestClient, engine: Any) -> None:
    engine.max_requests = 0
    full = client.post(PATH, json=HI)
    assert full.status_code == 429 and full.json()["error"]["type"] == "rate_limit_error"
    assert full.json()["error"]["details"]["error_code"] == "server_overloaded"
    assert full.headers["Retry-After"] and full.headers["x-should-retry"] == "true"
    engine.max_requests, engine.error_after, engine.at_readers_pace = 1000, 2, True
    failed = client.post(PATH, json=HI)
    assert failed.status_code == 500 and failed.json()["error"]["type"] == "api_error"
    events = stream(client)
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert "secret" not in json.dumps(events) + failed.text
    engine.is_draining = True
    drained = client.post(PATH, json=HI)
    assert drained.status_code == 503 and drained.json()["error"]["type"] == "overloaded_error"


def test_keys(make_app: Callable[..., FastAPI]) -> None:
    with TestClient(make_app(api_keys=("k",))) as client:
        assert client.post(PATH, json=HI, headers={"X-Api-Key": "k"}).status_code == 200
        assert client.post(PATH, json=HI, headers={"Authorization": "Bearer k"}).status_code == 200
        refused = client.post(PATH, json=HI, headers={"X-Api-Key": "l"})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"


def test_fields_without_effect_are_named(client: TestClient) -> None:
    text = {"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [text, text]}]
    body = {**HI, "messages": messages, "metadata": {"user_id": "me"}}
    response = client.post(PATH, json=body)
    assert response.headers["X-Ignored-Parameters"] == "cache_control, metadata"


def test_what_the_model_does_not_heed_is_named_as_it_was_sent(client: TestClient) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    messages = [*HI["messages"], {"role": "assistant", "content": [thought]}, *HI["messages"]]
    body = {"messages": messages, "output_config": {"effort": "low"}}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    response = client.post(PATH, json={**HI, **body})
    names = "messages.thinking, output_config.effort, thinking, thinking.budget_tokens"
    assert response.headers["X-Ignored-Parameters"] == names
    counted = client.post(PATH + "/count_tokens", json=body)
    assert counted.headers["X-Ignored-Parameters"] == names
