"""POST /v1/responses and the stored responses, on the scripted engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from openai.types.responses import Response as OfficialResponse
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from starlette.testclient import TestClient

PATH = "/v1/responses"


def create(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"input": "hi", **fields})
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    OfficialResponse.model_validate(content)
    return content


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(PATH, json={"input": "hi", "stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def prompt_of(engine: Any, index: int = -1) -> str:
    text: str = engine.tokenizer.decode(engine.submitted[index].prompt_token_ids)
    return text


def test_an_answer_as_the_official_types_know_it(client: TestClient, engine: Any) -> None:
    content = create(client, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    response = OfficialResponse.model_validate(content)
    assert response.output_text == "Hello" and response.status == "completed"
    assert response.usage is not None and response.usage.output_tokens == 6
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert prompt_of(engine) == "<system>Be brief.\n<user>hi\n<assistant>"
    assert engine.submitted[0].params.temperature == 0.5
    assert content["instructions"] == "Be brief." and content["metadata"] == {"a": "b"}


def test_input_tokens_are_those_that_an_answer_counts(client: TestClient, engine: Any) -> None:
    """The count includes instructions and earlier turns; nothing is generated or stored."""
    first = create(client)
    for fields in (
        {},
        {"instructions": "Be brief.", "temperature": 0.5},
        {"input": [{"role": "user", "content": "a longer question"}]},
        {"previous_response_id": first["id"]},
        {"reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
        {"conversation": None, "model": "tiny", "parallel_tool_calls": None},
    ):
        num_submitted = len(engine.submitted)
        counted = client.post(f"{PATH}/input_tokens", json={"input": "hi", **fields})
        assert counted.status_code == 200, counted.text
        assert len(engine.submitted) == num_submitted
        InputTokenCountResponse.model_validate(counted.json())
        answer = create(client, **fields)
        assert counted.json() == {
            "object": "response.input_tokens",
            "input_tokens": answer["usage"]["input_tokens"],
        }


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"input": 5}, "input"), ({"input": "a", "x": 1}, "x"), ({}, "input")],
)
def test_bad_input_is_not_counted(client: TestClient, fields: dict[str, Any], param: str) -> None:
    refused = client.post(f"{PATH}/input_tokens", json=fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_compaction_is_not_served(client: TestClient) -> None:
    refused = client.post(f"{PATH}/compact", json={"model": "tiny", "input": "hi"})
    assert refused.status_code == 404
    assert "does not compact responses" in refused.json()["error"]["message"]


def test_an_answer_that_is_cut_is_incomplete(client: TestClient) -> None:
    content = create(client, max_output_tokens=2)
    assert content["status"] == "incomplete"
    assert content["incomplete_details"] == {"reason": "max_output_tokens"}
    assert content["output"][0]["status"] == "incomplete"
    assert content["output"][0]["content"][0]["text"] == "He"


def test_the_events_of_a_stream(client: TestClient) -> None:
    events = stream(client)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    ends = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[-4:] == ends
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if "delta" in event) == "Hello"
    assert events[-4]["text"] == "Hello"
    assert events[-1]["response"]["output"][0] == events[-2]["item"]


def test_log_probabilities_are_those_of_the_chat(client: TestClient) -> None:
    content = create(client, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = content["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs][:5] == list("Hello")
    assert len(logprobs[0]["top_logprobs"]) == 2


def test_a_conversation_by_previous_response_id(client: TestClient, engine: Any) -> None:
    first = create(client, input="one", instructions="Not carried over.")
    second = create(client, input="two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert prompt_of(engine) == "<user>one\n<assistant>Hello\n<user>two\n<assistant>"
    third = stream(client, input="3", previous_response_id=second["id"])
    create(client, input="4", previous_response_id=third[-1]["response"]["id"])
    assert prompt_of(engine).count("<assistant>Hello") == 3


def test_get_delete_and_input_items(client: TestClient) -> None:
    items = [{"role": "user", "content": str(i)} for i in range(3)]
    content = create(client, input=items)
    path = f"{PATH}/{content['id']}"
    assert client.get(path).json() == content
    page = client.get(f"{path}/input_items", params={"order": "asc", "limit": 2}).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["0", "1"]
    assert page["has_more"] and page["last_id"] == page["data"][1]["id"]
    rest = client.get(f"{path}/input_items", params={"order": "asc", "after": page["last_id"]})
    assert [item["content"][0]["text"] for item in rest.json()["data"]] == ["2"]
    newest = client.get(f"{path}/input_items", params={"limit": 1}).json()
    assert newest["data"][0]["content"][0]["text"] == "2"
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "nobody"}):
        assert client.get(f"{path}/input_items", params=query).status_code == 400
    assert client.delete(path).json() == {
        "id": content["id"],
        "object": "response",
        "deleted": True,
    }
    for answer in (client.get(path), client.delete(path), client.get(f"{path}/input_items")):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "response_not_found"


def test_what_is_not_to_be_stored_is_not(client: TestClient) -> None:
    content = create(client, store=False)
    assert content["store"] is False
    assert client.get(f"{PATH}/{content['id']}").status_code == 404
    events = stream(client, store=False)
    assert client.get(f"{PATH}/{events[-1]['response']['id']}").status_code == 404


def test_another_key_finds_nothing(make_app: Callable[..., FastAPI]) -> None:
    mine, other = {"Authorization": "Bearer a"}, {"X-Api-Key": "b"}
    with TestClient(make_app(api_keys=("a", "b"))) as client:
        made = client.post(PATH, json={"input": "hi"}, headers=mine).json()
        path = f"{PATH}/{made['id']}"
        assert client.get(path, headers=mine).status_code == 200
        assert client.get(path, headers=other).status_code == 404
        assert client.delete(path, headers=other).status_code == 404
        assert client.post(f"{path}/cancel", headers=other).status_code == 404
        body = {"input": "hi", "previous_response_id": made["id"]}
        refused = client.post(PATH, json=body, headers=other)
        assert refused.status_code == 404
        assert refused.json()["error"]["param"] == "previous_response_id"
        assert client.post(PATH, json=body, headers=mine).status_code == 200


def test_a_background_response_is_found_when_it_has_ended(client: TestClient) -> None:
    begun = create(client, background=True)
    assert begun["status"] == "in_progress" and begun["background"]
    for _ in range(3000):
        found = client.get(f"{PATH}/{begun['id']}").json()
        if found["status"] == "completed":
            break
        time.sleep(0.01)
    assert found["output"][0]["content"][0]["text"] == "Hello"


def test_a_background_response_is_cancelled(client: TestClient, engine: Any) -> None:
    engine.step_s = 600.0
    begun = create(client, background=True)
    body = {"input": "more", "previous_response_id": begun["id"]}
    assert client.post(PATH, json=body).status_code == 400, "it has not ended"
    cancelled = client.post(f"{PATH}/{begun['id']}/cancel").json()
    assert cancelled["status"] == "cancelled" and engine.aborted
    assert client.post(f"{PATH}/{begun['id']}/cancel").json() == cancelled, "harmless again"
    engine.step_s = 0.0
    whole = create(client)
    assert client.post(f"{PATH}/{whole['id']}/cancel").status_code == 400


def test_a_background_response_counts_as_open_for_its_key(
    make_app: Callable[..., FastAPI], engine: Any
) -> None:
    engine.step_s = 600.0
    with TestClient(make_app(key_max_concurrent=1)) as client:
        begun = create(client, background=True)
        refused = client.post(PATH, json={"input": "hi"})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        cancelled = client.post(f"{PATH}/{begun['id']}/cancel")
        assert cancelled.json()["status"] == "cancelled" and engine.aborted
        engine.step_s = 0.0
        create(client)


def test_a_background_response_that_nobody_could_find_is_ended(
    make_app: Callable[..., FastAPI], engine: Any
) -> None:
    """Other answers do not remove it from the store; another background response does, and stops
    it."""
    with TestClient(make_app(max_stored_responses=1)) as client:
        engine.step_s = 600.0
        first = create(client, background=True)
        engine.step_s = 0.0
        create(client)
        assert client.get(f"{PATH}/{first['id']}").json()["status"] == "in_progress"
        assert not engine.aborted
        engine.step_s = 600.0
        second = create(client, background=True)
        assert client.get(f"{PATH}/{first['id']}").status_code == 404
        assert len(engine.aborted) == 1, "it runs on for nobody"
        client.post(f"{PATH}/{second['id']}/cancel")
        assert len(engine.aborted) == 2


def test_a_background_response_without_a_store_is_refused(
    make_app: Callable[..., FastAPI], engine: Any
) -> None:
    engine.step_s = 600.0
    with TestClient(make_app(max_stored_responses=0)) as client:
        refused = client.post(PATH, json={"input": "hi", "background": True})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "background"
        assert len(engine.aborted) == 1


def test_a_background_response_that_fails_says_so(client: TestClient, engine: Any) -> None:
    engine.error_after = 2
    begun = create(client, background=True)
    for _ in range(3000):
        found = client.get(f"{PATH}/{begun['id']}").json()
        if found["status"] != "in_progress":
            break
        time.sleep(0.01)
    assert found["status"] == "failed" and found["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(found)


def test_a_stream_that_fails_ends_with_an_event(client: TestClient, engine: Any) -> None:
    engine.error_after, engine.at_readers_pace = 2, True
    events = stream(client)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "He"
    assert client.post(PATH, json={"input": "hi"}).status_code == 500


def test_the_store_can_be_off(make_app: Callable[..., FastAPI]) -> None:
    with TestClient(make_app(max_stored_responses=0)) as client:
        content = create(client)
        assert client.get(f"{PATH}/{content['id']}").status_code == 404


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "invalid_type"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [3]}, "input.0", "invalid_type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", None),
        ({"input": [{"role": "king", "content": "a"}]}, "input.0.role", "invalid_value"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.type",
            "invalid_value",
        ),
        ({"input": "a" * 4000}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "context_length_exceeded"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"temperature": 3.0}, "temperature", "invalid_value"),
        ({"colour": "red"}, "colour", "unknown_parameter"),
        ({"conversation": "c1"}, "conversation", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"background": True, "stream": True}, "background", "unsupported_parameter"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"include": ["all"]}, "include.0", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"metadata": {"a" * 65: "b"}}, "metadata", "invalid_value"),
        ({"text": {"format": {"type": "text", "x": 1}}}, "text.format.x", "unknown_parameter"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n"}}},
            "text.format.schema",
            "missing_required_parameter",
        ),
        (
            {"tool_choice": {"type": "function", "name": "f", "x": 1}},
            "tool_choice.x",
            "unknown_parameter",
        ),
        ({"stop": 3}, "stop", None),
        ({"seed": "x"}, "seed", "invalid_type"),
    ],
)
def test_what_is_refused(
    client: TestClient, fields: dict[str, Any], param: str, code: str | None
) -> None:
    response = client.post(PATH, json={"input": "hi", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert code in (None, error["code"]), error
    assert "messages" not in error["message"], "the client knows no messages here"


def test_fields_without_effect_are_named(client: TestClient) -> None:
    body = {
        "input": "hi",
        "user": "me",
        "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
    }
    response = client.post(PATH, json=body)
    assert response.headers["X-Ignored-Parameters"] == (
        "include.reasoning.encrypted_content, text.verbosity, user"
    )


def test_what_the_model_does_not_heed_is_named_as_it_was_sent(client: TestClient) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]}
    items = [thought, {"role": "user", "content": "hi"}]
    response = client.post(PATH, json={"input": items, "reasoning": {"effort": "low"}})
    assert response.headers["X-Ignored-Parameters"] == "input.reasoning, reasoning.effort"


def test_a_client_that_hangs_up_ends_its_response(live: Any, engine: Any) -> None:
    engine.script, engine.step_s = lambda request: "x" * 400, 0.1

    async def main() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        body = json.dumps({"input": "hi", "stream": True}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"output_text.delta")
        writer.close()
        for _ in range(3000):
            if engine.aborted:
                return
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert engine.aborted
