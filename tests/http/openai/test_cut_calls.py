"""Calls that `max_tokens` or a stop string cut, on every route, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION: Any = {"name": "f", "parameters": SCHEMA}
USER: Any = {"role": "user", "content": "hi"}
HEAD = '<tool_call>\n{"name": "f"'
ARGUMENTS = '{"city": "Oslo"}'
CALL = f'{HEAD}, "arguments": {ARGUMENTS}}}\n</tool_call>'
BODIES: Any = {
    "/v1/chat/completions": {
        "messages": [USER],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
    },
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "required",
    },
    "/v1/messages": {
        "messages": [USER],
        "max_tokens": 400,
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
}
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
Answer = tuple[str, str | None, str]  # its text, the arguments of its call, how it ended


def ask(served: Any, path: str, is_streamed: bool, **fields: Any) -> Answer:
    client, engine = served
    engine.script = lambda request: CALL
    stop = fields.pop("stop", None)
    if stop is not None:
        fields["stop_sequences" if path == "/v1/messages" else "stop"] = [stop]
    if (count := fields.pop("num_tokens", None)) is not None:
        fields[LIMITS[path]] = count
    body = {**BODIES[path], **fields, "stream": is_streamed}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    read = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}
    return read[path](response, is_streamed)


def events_of(response: Any) -> list[Any]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def chat(response: Any, is_streamed: bool) -> Answer:
    if not is_streamed:
        choice = response.json()["choices"][0]
        calls = choice["message"].get("tool_calls")
        arguments = calls[0]["function"]["arguments"] if calls else None
        return choice["message"]["content"] or "", arguments, choice["finish_reason"]
    choices = [event["choices"][0] for event in events_of(response)]
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in deltas) if deltas else None
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    return content, arguments, choices[-1]["finish_reason"]


def responses(response: Any, is_streamed: bool) -> Answer:
    if is_streamed:
        events = events_of(response)
        whole = events[-1]["response"]
        kind = "response.function_call_arguments.delta"
        streamed = "".join(event["delta"] for event in events if event["type"] == kind)
    else:
        whole = response.json()
    (item,) = whole["output"]
    if item["type"] == "message":
        return item["content"][0]["text"], None, f"{whole['status']}, {item['status']}"
    if is_streamed:
        assert item["arguments"] == streamed
    return "", item["arguments"], f"{whole['status']}, {item['status']}"


def messages(response: Any, is_streamed: bool) -> Answer:
    if not is_streamed:
        whole = response.json()
        (block,) = whole["content"]
        if block["type"] == "text":
            return block["text"], None, whole["stop_reason"]
        given = block["input"]
        arguments = given.get("_raw", json.dumps(given) if given else "")
        return "", arguments, whole["stop_reason"]
    events = events_of(response)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    is_call = any(e.get("content_block", {}).get("type") == "tool_use" for e in events)
    text = "".join(delta.get("text", "") for delta in deltas)
    arguments = "".join(delta.get("partial_json", "") for delta in deltas) if is_call else None
    reason = next(e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta")
    return text, arguments, reason


LENGTH = {
    "/v1/chat/completions": "length",
    "/v1/responses": "incomplete, incomplete",
    "/v1/messages": "max_tokens",
}
STOPPED = {
    "/v1/chat/completions": "stop",
    "/v1/responses": "completed, incomplete",
    "/v1/messages": "stop_sequence",
}
CALLED = {
    "/v1/chat/completions": "tool_calls",
    "/v1/responses": "completed, completed",
    "/v1/messages": "tool_use",
}


@pytest.fixture(scope="module")
def served(start_served_once: Any) -> Any:
    return start_served_once(TEMPLATE)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_streamed", [False, True])
class TestCut:
    @pytest.mark.parametrize("count", [1, 7, 12, len(HEAD) - 1])
    def test_within_the_head(self, served: Any, path: str, is_streamed: bool, count: int) -> None:
        assert ask(served, path, is_streamed, num_tokens=count) == ("", None, LENGTH[path])

    def test_behind_the_name(self, served: Any, path: str, is_streamed: bool) -> None:
        for count in (len(HEAD), len(HEAD) + 10):
            answer = ask(served, path, is_streamed, num_tokens=count)
            assert answer == ("", "", LENGTH[path])

    def test_within_the_arguments(self, served: Any, path: str, is_streamed: bool) -> None:
        count = CALL.index("lo") + 1
        answer = ask(served, path, is_streamed, num_tokens=count)
        assert answer == ("", '{"city": "Osl', LENGTH[path])

    def test_behind_the_arguments(self, served: Any, path: str, is_streamed: bool) -> None:
        answer = ask(served, path, is_streamed, num_tokens=len(CALL) - 3)
        assert answer == ("", ARGUMENTS, LENGTH[path])

    def test_by_a_stop_string(self, served: Any, path: str, is_streamed: bool) -> None:
        answer = ask(served, path, is_streamed, stop="slo")
        assert answer == ("", '{"city": "O', STOPPED[path])
        answer = ask(served, path, is_streamed, stop="name")
        assert answer == ("", None, STOPPED[path])
        answer = ask(served, path, is_streamed, stop=", ")
        assert answer == ("", "", STOPPED[path])

    def test_not_by_one_behind_it(self, served: Any, path: str, is_streamed: bool) -> None:
        answer = ask(served, path, is_streamed, stop="</tool_call>")
        assert answer == ("", ARGUMENTS, CALLED[path])

    def test_a_whole_call(self, served: Any, path: str, is_streamed: bool) -> None:
        assert ask(served, path, is_streamed) == ("", ARGUMENTS, CALLED[path])

    def test_one_that_was_not_forced(self, served: Any, path: str, is_streamed: bool) -> None:
        """An incomplete opening marker may be text; everything behind a whole one is markup."""
        auto: Any = {"tool_choice": None}
        text, arguments, _ = ask(served, path, is_streamed, num_tokens=5, **auto)
        assert (text, arguments) == (CALL[:5], None)
        for count in (12, len(HEAD) - 1):
            answer = ask(served, path, is_streamed, num_tokens=count, **auto)
            assert answer == ("", None, LENGTH[path])
        answer = ask(served, path, is_streamed, num_tokens=len(HEAD) + 3, **auto)
        assert answer == ("", "", LENGTH[path])
        answer = ask(served, path, is_streamed, stop="slo", **auto)
        assert answer == ("", '{"city": "O', STOPPED[path])
