"""Deltas of several tokens: every route answers as if the tokens came one by one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from starlette.testclient import TestClient

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}"
    "{{ c.function.name }}{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ '<think>' if enable_thinking else '' }}{% endif %}"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ås"}}\n</tool_call>'
CALLS = f"<think>Où? 🌧️ or ☀️?</think>Let me see. {CALL}\n{CALL}"
THOUGHT = "<think>Où? 🌧️ or ☀️?</think>In Spaîn, mainly in the plain."
SHORT_CALLS = f"A {CALL} B {CALL} C"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
ASK = [{"role": "user", "content": "hi"}]
CHAT = {"messages": ASK, "tools": [{"type": "function", "function": FUNCTION}]}
TEXT = {"prompt": "x", "max_tokens": 300}
PROSE = "The 🌧️ in Spaîn stays mainly in the plain, a¢¢ording to some."

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "text": ("/v1/completions", PROSE, {**TEXT, "logprobs": 2, "n": 2}),
    "echo": ("/v1/completions", PROSE, {**TEXT, "echo": True, "logprobs": 1}),
    "stop string": ("/v1/completions", PROSE, {**TEXT, "stop": ["n stay", "the"]}),
    "kept stop string": (
        "/v1/completions",
        PROSE,
        {**TEXT, "stop": ["main"], "include_stop_str_in_output": True, "logprobs": 0},
    ),
    "late stop string": (
        "/v1/completions",
        PROSE,
        {**TEXT, "stop": ["in"], "min_tokens": 19},
    ),
    "limit": (
        "/v1/completions",
        PROSE,
        {**TEXT, "max_tokens": 13, "return_token_ids": True},
    ),
    "stop id": ("/v1/completions", PROSE, {**TEXT, "stop_token_ids": [75]}),
    "chat": (
        "/v1/chat/completions",
        PROSE,
        {"messages": ASK, "logprobs": True, "top_logprobs": 2, "n": 2},
    ),
    "chat, stop string": (
        "/v1/chat/completions",
        PROSE,
        {"messages": ASK, "logprobs": True, "stop": ["n stay", "the"]},
    ),
    "reasoning": ("/v1/chat/completions", THOUGHT, {"messages": ASK, "logprobs": True}),
    "reasoning, stop string": (
        "/v1/chat/completions",
        THOUGHT,
        {"messages": ASK, "stop": ["plain"], "return_token_ids": True},
    ),
    "calls": ("/v1/chat/completions", CALLS, CHAT),
    "calls, logprobs": (
        "/v1/chat/completions",
        CALLS,
        {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 1},
    ),
    "cut call": ("/v1/chat/completions", CALLS, {**CHAT, "max_tokens": 90}),
    "stopped call": ("/v1/chat/completions", CALLS, {**CHAT, "stop": ['"city']}),
    "responses": (
        "/v1/responses",
        CALLS,
        {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "store": False},
    ),
    "responses, stop string": (
        "/v1/responses",
        THOUGHT,
        {"input": "hi", "stop": ["plain"], "store": False},
    ),
    "responses, cut call": (
        "/v1/responses",
        CALLS,
        {
            "input": "hi",
            "tools": [{"type": "function", **FUNCTION}],
            "max_output_tokens": 90,
            "store": False,
        },
    ),
    "responses, text behind calls": (
        "/v1/responses",
        SHORT_CALLS,
        {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "store": False},
    ),
    "messages, text behind calls": (
        "/v1/messages",
        SHORT_CALLS,
        {
            "max_tokens": 300,
            "messages": ASK,
            "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
        },
    ),
    "responses, logprobs": (
        "/v1/responses",
        THOUGHT,
        {
            "input": "hi",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "store": False,
        },
    ),
    "messages, stop sequence": (
        "/v1/messages",
        THOUGHT,
        {"max_tokens": 300, "messages": ASK, "stop_sequences": ["plain"]},
    ),
    "messages, limit": ("/v1/messages", THOUGHT, {"max_tokens": 33, "messages": ASK}),
    "messages": (
        "/v1/messages",
        CALLS,
        {
            "max_tokens": 300,
            "messages": ASK,
            "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
        },
    ),
}
# They are new in every answer, or say how a stream was cut.
_NEW = {"id", "created", "created_at", "completed_at", "item_id", "sequence_number", "call_id"}
_PARTS = ("delta", "text", "partial_json", "thinking", "content", "arguments", "reasoning")


def of_one_answer(value: Any) -> Any:
    """Removes the fields that are new in every answer."""
    if isinstance(value, dict):
        return {key: of_one_answer(item) for key, item in value.items() if key not in _NEW}
    return [of_one_answer(item) for item in value] if isinstance(value, list) else value


def fold(found: dict[Any, Any], place: tuple[Any, ...], value: Any) -> None:
    """Adds an event to the earlier ones: parts of texts and lists are joined."""
    if isinstance(value, dict):
        names = ("type",) if not place else ("output_index", "content_index", "index")
        index = [value[name] for name in names if name in value]
        for key, item in value.items():
            if key not in _NEW:
                fold(found, (*place, *index, key), item)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict) and "index" in item:
                fold(found, place, item)
            else:
                found.setdefault(place, []).append(of_one_answer(item))
    elif isinstance(value, str) and (place[-1] in _PARTS or place[-1].startswith("reasoning")):
        found[place] = found.get(place, "") + value
    elif value is not None or place not in found:
        found[place] = value


def answers(client: TestClient, route: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the whole answer and the stream."""
    whole = client.post(route, json=fields)
    options = {"stream_options": {"include_usage": True}} if "completions" in route else {}
    streamed = client.post(route, json={**fields, "stream": True, **options})
    assert whole.status_code == streamed.status_code == 200, whole.text + streamed.text
    found: dict[Any, Any] = {}
    for data in re.findall(r"^data: (\{.*)$", streamed.text, re.MULTILINE):
        fold(found, (), json.loads(data))
    return of_one_answer(whole.json()), found


@pytest.fixture(scope="module")
def served(start_served_once: Any) -> Any:
    return start_served_once(TEMPLATE)


@pytest.mark.parametrize("kind", CASES)
def test_a_run_is_read_as_its_tokens_one_by_one(served: Any, kind: str) -> None:
    client, engine = served
    engine.tokens_per_step = 1
    route, answer, fields = CASES[kind]
    engine.script = lambda request: answer
    expected = answers(client, route, fields)
    for size in (2, 3, 7, 500):
        engine.tokens_per_step = size
        assert answers(client, route, fields) == expected, f"{size} tokens per step"


def test_metrics_count_tokens_not_deltas(start_served: Any) -> None:
    client, engine = start_served(TEMPLATE)
    engine.script = lambda request: "0123456789"
    sums = []
    for size in (1, 4):
        engine.tokens_per_step = size
        client.post("/v1/completions", json={**TEXT, "stream": True})
        text = client.get("/metrics").text
        sums.append(float(re.findall(r"request_generation_tokens_sum\{.*\} (.*)", text)[0]))
    assert sums == [11, 22]
