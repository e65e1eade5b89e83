"""Parameters of other servers that OpenAI lacks: ids, prompt log probabilities, truncation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

BOTH = ("/v1/chat/completions", "/v1/completions")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = "<user>hi\n<assistant>"


def post(client: TestClient, route: str, **fields: Any) -> Any:
    body = CHAT if route == BOTH[0] else {"prompt": PROMPT}
    response = client.post(route, json={**body, **fields})
    assert response.status_code == 200, response.text
    return response


def events(response: Any) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]


@pytest.mark.parametrize("route", BOTH)
def test_token_ids(client: TestClient, engine: Any, route: str) -> None:
    body = post(client, route, return_token_ids=True, n=2).json()
    prompt_ids = list(engine.submitted[0].prompt_token_ids)
    for choice in body["choices"]:
        assert engine.tokenizer.decode(choice["token_ids"]) == "Hello"
        assert choice.get("prompt_token_ids", body.get("prompt_token_ids")) == prompt_ids
    chunks = events(post(client, route, return_token_ids=True, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    ids = [token for choice in choices for token in choice.get("token_ids", ())]
    assert engine.tokenizer.decode(ids) == "Hello"
    first = chunks[0] if route == BOTH[0] else choices[0]
    assert first["prompt_token_ids"] == prompt_ids
    assert sum("prompt_token_ids" in json.dumps(chunk) for chunk in chunks) == 1
    assert "token_ids" not in post(client, route).text


@pytest.mark.parametrize("route", BOTH)
def test_prompt_logprobs(client: TestClient, engine: Any, route: str) -> None:
    body = post(client, route, prompt_logprobs=1, n=2).json()
    prompt_ids = engine.submitted[0].prompt_token_ids
    for choice in body["choices"]:
        entries = body["prompt_logprobs"] if route == BOTH[0] else choice["prompt_logprobs"]
        assert len(entries) == len(prompt_ids)
        assert entries[0] is None
        token = str(prompt_ids[1])
        text = engine.tokenizer.token_text(prompt_ids[1])
        assert entries[1][token] == {"logprob": -0.5, "rank": 1, "decoded_token": text}
        assert choice["logprobs"] is None


@pytest.mark.parametrize("route", BOTH)
def test_the_usage_so_far_in_every_chunk(client: TestClient, route: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(post(client, route, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert all(chunk["usage"]["prompt_tokens"] == len(PROMPT) for chunk in chunks)
    if route == BOTH[0]:
        assert chunks[0]["choices"][0]["delta"]["content"] == "" and counts[:2] == [0, 1]


@pytest.mark.parametrize("route", BOTH)
def test_the_usage_so_far_is_that_of_the_tokens_shown(client: TestClient, route: str) -> None:
    """Several choices may come at once."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"stream": True, "stream_options": options, "n": 3, "return_token_ids": True}
    *chunks, last = events(post(client, route, **body))
    shown = 0
    for chunk in chunks:
        shown += len(chunk["choices"][0].get("token_ids", ()))
        assert chunk["usage"]["completion_tokens"] == shown, chunk
    assert last["usage"]["completion_tokens"] == shown == 18


@pytest.mark.parametrize("route", BOTH)
def test_truncation_keeps_the_end(client: TestClient, engine: Any, route: str) -> None:
    post(client, route, truncate_prompt_tokens=5)
    assert engine.tokenizer.decode(engine.submitted[-1].prompt_token_ids) == PROMPT[-5:]
    post(client, route, truncate_prompt_tokens=400)
    assert engine.tokenizer.decode(engine.submitted[-1].prompt_token_ids) == PROMPT
    long: dict[str, Any] = {"prompt": "x" * 900}
    if route == BOTH[0]:
        long = {"messages": [{"role": "user", "content": "x" * 900}]}
    post(client, route, truncate_prompt_tokens=-1, max_tokens=12, **long)
    assert len(engine.submitted[-1].prompt_token_ids) == 500


@pytest.mark.parametrize("route", BOTH)
def test_the_request_id_is_shown_and_the_engine_has_its_own(
    client: TestClient, engine: Any, route: str
) -> None:
    body = post(client, route, request_id="abc-1").json()
    assert body["id"].endswith("cmpl-abc-1")
    assert "abc-1" not in engine.submitted[-1].request_id


@pytest.mark.parametrize("route", BOTH)
def test_the_priority_reaches_the_engine(make_app: Any, engine: Any, route: str) -> None:
    client = TestClient(make_app(key_min_priority=-(2**31)))
    post(client, route, priority=-5, n=2)
    assert [request.priority for request in engine.submitted] == [-5, -5]
    for value, expected in ((2**31 - 1,) * 2, (-(2**31),) * 2, (0, 0), (None, 0)):
        post(client, route, priority=value)
        assert engine.submitted[-1].priority == expected
    post(client, route)
    assert engine.submitted[-1].priority == 0


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 4}),
    ],
)
def test_routes_that_know_no_priority(
    client: TestClient, engine: Any, route: str, body: dict[str, Any]
) -> None:
    response = client.post(route, json={**body, "priority": 1})
    assert response.status_code == 400
    assert "priority" in response.text
    assert engine.submitted == []


def test_the_last_message_goes_on(client: TestClient, engine: Any) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Well, "}]
    fields: dict[str, Any] = {"messages": messages, "continue_final_message": True}
    choice = post(client, BOTH[0], **fields).json()["choices"][0]
    assert engine.tokenizer.decode(engine.submitted[-1].prompt_token_ids).endswith(
        "<assistant>Well, "
    )
    assert choice["message"]["content"] == "Hello"
    choice = post(client, BOTH[0], **fields, echo=True).json()["choices"][0]
    assert choice["message"]["content"] == "Well, Hello"
    chunks = events(post(client, BOTH[0], **fields, echo=True, stream=True))
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "Well, Hello"


@pytest.mark.parametrize(
    ("last", "more"),
    [
        ({"role": "user", "content": "x"}, {}),
        ({"role": "assistant", "content": ""}, {}),
        ({"role": "assistant", "content": "x"}, {"add_generation_prompt": True}),
        ({"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, {}),
    ],
)
def test_what_cannot_go_on(client: TestClient, last: dict[str, Any], more: dict[str, Any]) -> None:
    body = {"messages": [last], "continue_final_message": True, **more}
    response = client.post(BOTH[0], json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize("route", BOTH)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_logprobs_of_given_tokens(
    client: TestClient, engine: Any, route: str, is_streamed: bool
) -> None:
    """Every choice has the given tokens in place of the likeliest ones."""
    is_chat = route == BOTH[0]
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 5} if is_chat else {"logprobs": 5}
    fields |= {"logprob_token_ids": [65, 66], "n": 2, "stream": is_streamed}
    response = post(client, route, **fields)
    found = events(response) if is_streamed else [response.json()]
    told = [c["logprobs"] for part in found for c in part["choices"] if c["logprobs"]]
    assert engine.submitted[-1].params.logprob_token_ids == (65, 66)
    named = [engine.tokenizer.token_text(token) for token in (65, 66)]
    count = 0
    for logprobs in told:
        entries = logprobs["content"] if is_chat else logprobs["top_logprobs"]
        for entry in entries:
            texts = [top["token"] for top in entry["top_logprobs"]] if is_chat else [*entry]
            assert len(texts) == 3 and texts[1:] == named
            count += 1
    assert count == 2 * len("Hello.")  # with the end of text
    empty = post(client, route, **{**fields, "logprob_token_ids": [], "stream": False}).json()
    assert engine.submitted[-1].params.logprob_token_ids == ()
    assert empty["choices"][0]["logprobs"] is not None


CHAT_LOGPROBS = {"logprobs": True}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (BOTH[0], {"logprob_token_ids": [1]}, "logprob_token_ids", "logprobs: true"),
    (BOTH[1], {"logprob_token_ids": [1]}, "logprob_token_ids", "0 is enough"),
    (
        BOTH[1],
        {"logprob_token_ids": [1], "logprobs": 0, "echo": True, "max_tokens": 0},
        "logprob_token_ids",
        "generated tokens",
    ),
    (BOTH[0], {**CHAT_LOGPROBS, "logprob_token_ids": [1] * 129}, "logprob_token_ids", "0 to 128"),
    (BOTH[0], {**CHAT_LOGPROBS, "logprob_token_ids": [999, 5, -3]}, "logprob_token_ids", "-3"),
    (BOTH[0], {**CHAT_LOGPROBS, "logprob_token_ids": [999, 5, 998]}, "logprob_token_ids", "998"),
    (BOTH[0], {**CHAT_LOGPROBS, "top_logprobs": -1}, "top_logprobs", "name tokens in logprob_to"),
    (BOTH[1], {"logprobs": -1}, "logprobs", "name tokens in logprob_token_ids"),
    (BOTH[0], {"prompt_logprobs": -1}, "prompt_logprobs", "must be 0 to 20 (the whole vocabular"),
    (BOTH[1], {"prompt_logprobs": -1}, "prompt_logprobs", "must be 0 to 20 (the whole vocabular"),
    (BOTH[0], {"logit_bias": {"a": 1, "5": 2, "b\u001b": 3}}, "logit_bias", "'a', 'b\\x1b'"),
    (
        BOTH[0],
        {"logit_bias": {"1": "x", "2": 3, "3": None}},
        "logit_bias",
        "the values of '1', '3'",
    ),
    (BOTH[1], {"logit_bias": {"998": 1, "5": 2, "999": 3}}, "logit_bias", "998, 999"),
    (BOTH[1], {"logit_bias": {"6": 300, "5": 2, "7": -101}}, "logit_bias", "300.0, -101.0"),
    (BOTH[1], {"logit_bias": {f"x{i}": 1 for i in range(999)}}, "logit_bias", "and 989 more"),
    (BOTH[1], {"stop_token_ids": [999, 998]}, "stop_token_ids", "999, 998"),
]


@pytest.mark.parametrize(("route", "fields", "param", "part"), REFUSED, ids=str)
def test_what_to_do_instead(
    client: TestClient, route: str, fields: dict[str, Any], param: str, part: str
) -> None:
    body = CHAT if route == BOTH[0] else {"prompt": PROMPT}
    response = client.post(route, json={**body, **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param
    assert part in error["message"] and len(error["message"]) < 400


def test_all_logprobs_of_responses(client: TestClient) -> None:
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": -1}
    error = client.post("/v1/responses", json=body).json()["error"]
    assert "the whole vocabulary, -1, is not served" in error["message"]


@pytest.mark.parametrize("route", BOTH)
def test_given_logprobs_of_a_large_whole_answer(client: TestClient, route: str) -> None:
    """A whole answer would be held in memory; a stream is not."""
    body = CHAT if route == BOTH[0] else {"prompt": PROMPT}
    fields = {**body, "logprobs": True if route == BOTH[0] else 0, "n": 128, "max_tokens": 200}
    fields["logprob_token_ids"] = [*range(100)]
    error = client.post(route, json=fields).json()["error"]
    assert error["param"] == "logprob_token_ids" and "2585600 log probabilities" in error["message"]
    assert client.post(route, json={**fields, "stream": True}).status_code == 200
    assert client.post(route, json={**fields, "max_tokens": 5}).status_code == 200
