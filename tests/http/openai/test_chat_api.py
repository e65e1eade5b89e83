"""POST /v1/chat/completions: shapes, streams, parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = "<user>hi\n<assistant>"


def post(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", json={**CHAT, **fields})


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    response = post(client, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line for line in response.text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def test_answer(client: TestClient, engine: Any) -> None:
    response = post(client)
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 6,
        "total_tokens": len(PROMPT) + 6,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    request = engine.submitted[0]
    assert engine.tokenizer.decode(request.prompt_token_ids) == PROMPT
    assert request.rules.max_tokens is None
    assert request.params.temperature == 1.0


@pytest.mark.parametrize(("fields", "salt"), [({}, ""), ({"cache_salt": "tenant-1"}, "tenant-1")])
def test_the_cache_salt_reaches_the_engine(
    client: TestClient, engine: Any, fields: dict[str, str], salt: str
) -> None:
    assert post(client, n=2, **fields).status_code == 200
    body = {"prompt": ["a", "b"], **fields}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert [request.cache_salt for request in engine.submitted] == [salt] * 4


def test_add_generation_prompt_and_developer_role(client: TestClient, engine: Any) -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]
    assert post(client, messages=messages, add_generation_prompt=False).status_code == 200
    assert engine.tokenizer.decode(engine.submitted[0].prompt_token_ids) == "<system>x\n"


def test_stream(client: TestClient) -> None:
    chunks = stream(client, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == "Hello"
    assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6


def test_stream_without_usage_has_no_usage(client: TestClient) -> None:
    assert all("usage" not in chunk for chunk in stream(client))


def test_stream_of_several_choices(client: TestClient, engine: Any) -> None:
    engine.script = lambda request: f"choice {request.choice} 🎉"
    chunks = stream(client, n=3)
    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {i: f"choice {i} 🎉" for i in range(3)}
    assert [request.choice for request in engine.submitted] == [0, 1, 2]


def test_several_choices_count_the_prompt_once(client: TestClient) -> None:
    body = post(client, n=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["prompt_tokens"] == len(PROMPT)
    assert body["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs(client: TestClient, engine: Any, is_stream: bool) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 2}
    if is_stream:
        choices = [chunk["choices"][0] for chunk in stream(client, **fields)]
        content = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    else:
        content = post(client, **fields).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", "e"]
    assert content[0]["bytes"] == [72]
    assert content[0]["logprob"] == -0.5
    assert len(content[0]["top_logprobs"]) == 2
    assert content[0]["top_logprobs"][0] == {"token": "H", "logprob": -0.5, "bytes": [72]}


@pytest.mark.parametrize("is_stream", [False, True])
def test_stop_string_cuts_and_aborts(client: TestClient, engine: Any, is_stream: bool) -> None:
    engine.script = lambda request: "one two STOP three"
    engine.at_readers_pace = True
    if is_stream:
        choices = [chunk["choices"][0] for chunk in stream(client, stop=["STOP"])]
        text, end = "".join(c["delta"].get("content", "") for c in choices), choices[-1]
    else:
        end = post(client, stop="STOP").json()["choices"][0]
        text = end["message"]["content"]
    assert text == "one two "
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", "STOP")
    assert engine.aborted == [engine.submitted[0].request_id]


def test_max_tokens_ends_with_length(client: TestClient) -> None:
    choice = post(client, max_completion_tokens=3, max_tokens=5).json()["choices"][0]
    assert choice["message"]["content"] == "Hel"
    assert choice["finish_reason"] == "length"


def test_all_parameters_reach_the_engine(client: TestClient, engine: Any) -> None:
    fields: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100},
        "seed": 42,
        "stop": ["a", "b"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 2,
        "n": 2,
        "best_of": 2,
        "max_tokens": 7,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": True,
        "top_logprobs": 4,
    }
    assert post(client, **fields).status_code == 200
    params = engine.submitted[1].params
    expected = {
        **fields,
        "stop": ("a", "b"),
        "stop_token_ids": (9,),
        "logit_bias": {5: -100},
        "logprobs": 4,
    }
    for name in set(expected) - {"best_of", "top_logprobs"}:
        assert getattr(params, name) == expected[name], name


def test_nulls_are_defaults(client: TestClient, engine: Any) -> None:
    names = (
        "temperature",
        "top_p",
        "stop",
        "n",
        "max_tokens",
        "stream",
        "tools",
        "logprobs",
        "seed",
    )
    assert post(client, **dict.fromkeys(names)).status_code == 200
    assert engine.submitted[0].params.n == 1


def test_fields_without_effect_are_listed(client: TestClient) -> None:
    response = post(
        client,
        user="me",
        metadata={"a": "b"},
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        messages=[{"role": "user", "content": "hi", "name": "bob", "tool_calls": None}],
    )
    assert response.status_code == 200
    assert response.headers["x-ignored-parameters"] == "messages.0.name, metadata, user"


def test_a_model_without_template_points_to_completions(make_app: Any, model: Any) -> None:
    object.__setattr__(model, "chat_template", None)
    response = TestClient(make_app()).post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]


def test_long_chats_are_rendered_off_the_loop(client: TestClient, engine: Any) -> None:
    parts = [{"type": "text", "text": "x"}]  # parts take the way of a long text
    for content, num_chars in (("x" * 3000, 3000), ("x" * 5000, 5000), (parts, 1)):
        response = post(client, messages=[{"role": "user", "content": content}])
        if num_chars == 1:
            assert response.status_code == 200
            continue
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        assert str(num_chars + len(PROMPT) - 2) in error["message"]
