"""Items, messages, events and the store of /v1/responses, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from moe_serve.errors import InvalidRequestError
from moe_serve.http.openai.responses.input_items import chat_messages, input_items
from moe_serve.http.openai.responses.output_items import OutputItems
from moe_serve.http.openai.responses.response_chat import (
    chat_response_format,
    chat_tool_choice,
    chat_tools,
)
from moe_serve.http.openai.responses.response_store import ResponseStore, StoredResponse
from moe_serve.http.schema.api_error import ApiError
from moe_serve.text.assistant.outbox import AssistantDelta, CallDelta

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def test_items_of_one_turn_become_one_message() -> None:
    items, ignored = input_items(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": [_part("input_text")]},
            {"role": "assistant", "content": "b"},
            {"role": "assistant", "content": [_part("output_text")], "phase": "final_answer"},
            {"role": "developer", "content": "c"},
        ],
        is_strict=True,
    )
    assert ignored == []
    calls = [_call("c1", "f"), _call("c2", "g")]
    assert chat_messages(items) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "t"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "t"},
        {"role": "developer", "content": "c"},
    ]
    assert all(item["id"] for item in items)
    assert {item.get("status") for item in items if item["type"] != "reasoning"} == {"completed"}


def _part(kind: str) -> dict[str, str]:
    return {"type": kind, "text": "t"}


def _call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_a_refusal_is_its_text() -> None:
    parts = [{"type": "refusal", "refusal": "no", "text": None}, _part("output_text")]
    items, _ = input_items([{"role": "assistant", "content": parts}], is_strict=True)
    (message,) = chat_messages(items)
    assert message["content"].split("\n")[0] == "no"


def test_the_output_of_an_answer_is_input_for_the_next() -> None:
    output = OutputItems()
    output.push(AssistantDelta(reasoning="hm"))
    output.push(AssistantDelta(content="yes"))
    output.push(AssistantDelta(calls=(CallDelta(index=0, id="c", name="f", arguments="{}"),)))
    output.finish("completed")
    items, ignored = input_items(output.items, is_strict=True)
    assert ignored == [] and items == output.items
    assert chat_messages(items) == [
        {
            "role": "assistant",
            "content": "yes",
            "reasoning_content": "hm",
            "tool_calls": [_call("c", "f")],
        }
    ]


def test_tokens_without_text_open_no_message() -> None:
    """A marker or half a character has no text; with logprobs it gives an empty delta."""
    output, entry = OutputItems(), {"token": "x", "logprob": 0.0}
    call = CallDelta(index=0, id="c", name="f", arguments='{"a":')
    for delta in (
        AssistantDelta(),
        AssistantDelta(reasoning="h"),
        AssistantDelta(),
        AssistantDelta(reasoning="m"),
        AssistantDelta(calls=(call,)),
        AssistantDelta(),
        AssistantDelta(calls=(CallDelta(index=0, arguments="1}"),)),
    ):
        output.push(delta, [entry])
    output.finish("completed")
    assert [item["type"] for item in output.items] == ["reasoning", "function_call"]
    assert output.items[0]["content"][0]["text"] == "hm"
    assert output.items[1]["arguments"] == '{"a":1}'
    output = OutputItems()
    for delta in (AssistantDelta(), AssistantDelta(content="é"), AssistantDelta()):
        output.push(delta, [entry])
    output.finish("completed")
    assert len(output.items[0]["content"][0]["logprobs"]) == 3


def test_unknown_fields_of_items_follow_the_strictness() -> None:
    value = [{"role": "user", "content": "a", "colour": 1}]
    with pytest.raises(InvalidRequestError, match=r"input\.0\.colour"):
        input_items(value, is_strict=True)
    items, ignored = input_items(value, is_strict=False)
    assert ignored == ["input.0.colour"] and "colour" not in items[0]


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_events_of_every_kind_as_the_official_types_know_them(num_pieces: int) -> None:
    output, events = OutputItems(), []
    for i in range(num_pieces):
        events += output.push(AssistantDelta(reasoning=f"r{i}"))
    for i in range(num_pieces):
        events += output.push(AssistantDelta(content=f"t{i}"))
    first = CallDelta(index=0, id="c0", name="f", arguments='{"a":')
    events += output.push(AssistantDelta(calls=(first, CallDelta(index=0, arguments="1}"))))
    events += output.push(AssistantDelta(calls=(CallDelta(index=1, id="c1", name="g"),)))
    events += output.finish("completed")
    for i, event in enumerate(events):
        parsed = EVENTS.validate_python({**event, "sequence_number": i})
        assert parsed.type == event["type"]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "output_item.added",
        "content_part.added",
        *["reasoning_text.delta"] * num_pieces,
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * num_pieces,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        *["function_call_arguments.delta"] * 2,
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert [item["type"] for item in output.items] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert output.items[2]["arguments"] == '{"a":1}' and output.items[2]["call_id"] == "c0"


@pytest.mark.parametrize("behind", [{"content": "t"}, {"reasoning": "t"}])
def test_the_rest_of_a_call_and_what_follows_it_may_come_together(behind: dict[str, str]) -> None:
    output = OutputItems()
    output.push(AssistantDelta(calls=(CallDelta(index=0, id="c0", name="f", arguments='{"a"'),)))
    rest, other = CallDelta(index=0, arguments=":1}"), CallDelta(index=1, id="c1", name="g")
    output.push(AssistantDelta(**behind, calls=(rest, other)))  # type: ignore[arg-type]
    output.finish("completed")
    text = "message" if "content" in behind else "reasoning"
    assert [item["type"] for item in output.items] == ["function_call", text, "function_call"]
    assert output.items[0]["arguments"] == '{"a":1}'


def test_an_answer_without_text_is_an_empty_message() -> None:
    output = OutputItems()
    kinds = [event["type"] for event in output.finish("incomplete")]
    assert kinds[0] == "response.output_item.added" and len(kinds) == 5
    assert output.items[0]["content"][0]["text"] == ""
    assert output.items[0]["status"] == "incomplete"


def test_tools_and_choices() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    tools, ignored = chat_tools([{"type": "function", **function}], is_strict=True)
    assert tools == [{"type": "function", "function": function}] and ignored == []
    assert chat_tool_choice("required", tools) == ("required", tools)
    named = {"type": "function", "name": "f"}
    assert chat_tool_choice(named, tools)[0] == {"type": "function", "function": {"name": "f"}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    assert chat_tool_choice(allowed, tools) == ("required", tools)
    allowed["tools"] = [{"type": "function", "name": "g"}]
    with pytest.raises(InvalidRequestError, match="names none of the functions"):
        chat_tool_choice(allowed, tools)
    for wrong in ("always", 3, {"type": "web_search"}, {"type": "allowed_tools"}):
        with pytest.raises(InvalidRequestError, match="tool_choice"):
            chat_tool_choice(wrong, tools)


def test_the_format_of_a_text() -> None:
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat_response_format(None) is None
    assert chat_response_format({"type": "text"}) is None
    assert chat_response_format({"type": "json_object"}) == {"type": "json_object"}
    assert chat_response_format({"type": "json_schema", **schema}) == {
        "type": "json_schema",
        "json_schema": schema,
    }


class TestStore:
    def entry(
        self, name: str, num_bytes: int = 10, owner: str = "me", is_ended: bool = True
    ) -> StoredResponse:
        body = b"x" * num_bytes
        return StoredResponse(
            id=name, owner=owner, response=body, history=b"", items=b"", output=b"",
            is_ended=is_ended,
        )  # fmt: skip

    def test_the_oldest_leave_when_there_are_too_many(self) -> None:
        store = ResponseStore(max_entries=2, max_bytes=1000, ttl_s=10)
        for name in "abc":
            store.put(self.entry(name))
        assert len(store) == 2 and store.num_bytes == 20
        with pytest.raises(ApiError):
            store.get("a", "me")
        assert store.get("c", "me").id == "c"

    def test_the_oldest_leave_when_they_are_too_large(self) -> None:
        store = ResponseStore(max_entries=100, max_bytes=100, ttl_s=10)
        store.put(self.entry("a", 60))
        store.put(self.entry("b", 60))
        assert len(store) == 1 and store.num_bytes == 60
        store.put(self.entry("c", 101))
        assert len(store) == 1, "what is not kept throws nobody out"

    def test_entries_expire(self) -> None:
        now = [0.0]
        store = ResponseStore(max_entries=9, max_bytes=999, ttl_s=10, clock=lambda: now[0])
        store.put(self.entry("a"))
        now[0] = 6.0
        store.put(self.entry("b"))
        now[0] = 10.0
        with pytest.raises(ApiError):
            store.get("a", "me")
        assert store.get("b", "me").id == "b" and len(store) == 1

    def test_what_runs_does_not_expire(self) -> None:
        now = [0.0]
        store = ResponseStore(max_entries=9, max_bytes=999, ttl_s=10, clock=lambda: now[0])
        store.put(self.entry("a", is_ended=False))
        store.put(self.entry("b"))
        now[0] = 100.0
        assert store.get("a", "me").id == "a" and len(store) == 1
        store.replace(self.entry("a"))
        now[0] = 110.0
        with pytest.raises(ApiError):
            store.get("a", "me")

    def test_what_runs_leaves_last_and_is_told_of(self) -> None:
        lost: list[str] = []
        store = ResponseStore(max_entries=2, max_bytes=999, ttl_s=10, on_loss=lost.append)
        store.put(self.entry("a", is_ended=False))
        for name in "bcd":
            store.put(self.entry(name))
        assert store.get("a", "me").id == "a" and store.has("d") and len(store) == 2
        store.put(self.entry("e", is_ended=False))
        store.put(self.entry("f"))
        assert store.has("a") and store.has("e") and not lost, "nobody's answer ends a run"
        store.put(self.entry("g", is_ended=False))
        assert lost == ["a"] and store.has("e") and store.has("g")

    def test_what_was_deleted_does_not_come_back(self) -> None:
        store = ResponseStore(max_entries=9, max_bytes=999, ttl_s=10)
        store.put(self.entry("a"))
        store.replace(self.entry("a", 20))
        assert store.num_bytes == 20
        store.delete("a", "me")
        store.replace(self.entry("a"))
        assert len(store) == 0 and store.num_bytes == 0

    def test_what_others_own_is_not_there(self) -> None:
        store = ResponseStore(max_entries=9, max_bytes=999, ttl_s=10)
        store.put(self.entry("a"))
        with pytest.raises(ApiError) as mine:
            store.get("a", "you")
        with pytest.raises(ApiError) as nobodys:
            store.get("b", "you")
        assert mine.value.message.replace("'a'", "'b'") == nobodys.value.message

    def test_ten_thousand_entries_stay_within_the_bytes(self) -> None:
        store = ResponseStore(max_entries=10**6, max_bytes=5000, ttl_s=10)
        for i in range(10_000):
            store.put(self.entry(str(i), 1 + i % 90))
        assert store.num_bytes <= 5000 and len(store) < 200
