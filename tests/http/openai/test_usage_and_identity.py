"""Fields of answers beside the text: the system's fingerprint, the model's root, usage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.config.sections import ServerConfig
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.http.app import create_app
from moe_serve.http.dashboard.facts import DashboardFacts
from moe_serve.http.metrics.scrape import CacheFacts

FINGERPRINT = "fp_0123456789ab"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    "{# <think> and </think> are the markers #}"
)


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.fixture
def known(engine: Any, model: Any) -> Iterator[TestClient]:
    app: FastAPI = create_app(
        engine, replace(model, root="folder", fingerprint=FINGERPRINT), ServerConfig()
    )
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("n", [1, 3])
def test_every_answer_and_every_chunk_has_the_fingerprint(
    known: TestClient, route: str, n: int
) -> None:
    whole = known.post(route, json={**ROUTES[route], "n": n}).json()
    assert whole["system_fingerprint"] == FINGERPRINT
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(known.post(route, json={**ROUTES[route], "n": n, **usage}).text)
    assert len(chunks) > 3
    assert {chunk["system_fingerprint"] for chunk in chunks} == {FINGERPRINT}


def test_the_root_of_the_model(known: TestClient, client: TestClient) -> None:
    for entry in (known.get("/v1/models").json()["data"][0], known.get("/v1/models/tiny").json()):
        assert (entry["id"], entry["root"], entry["parent"]) == ("tiny", "folder", None)
    assert client.get("/v1/models/tiny").json()["root"] == "tiny"


@pytest.fixture
def thinking(start_served: Callable[..., Any]) -> TestClient:
    client, engine = start_served(THINKING)
    engine.script = lambda request: "<think>12345</think>Yes"
    assert isinstance(client, TestClient)
    return client


@pytest.mark.parametrize(
    "fields", [{}, {"include_reasoning": False}, {"separate_reasoning": False}]
)
@pytest.mark.parametrize("n", [1, 2])
def test_reasoning_tokens_of_chats(thinking: TestClient, fields: dict[str, Any], n: int) -> None:
    """Reasoning counts when it is shown, hidden, or left in the content."""
    body = {**CHAT, **fields, "n": n}
    whole = thinking.post("/v1/chat/completions", json=body).json()["usage"]
    assert whole["completion_tokens_details"] == {"reasoning_tokens": 5 * n}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(thinking.post("/v1/chat/completions", json=streamed).text)
    assert chunks[-1]["usage"] == whole


def test_reasoning_tokens_of_channels(start_served: Callable[..., Any]) -> None:
    """A model may open its reasoning more than once."""
    client, engine = start_served(THINKING + "{# <|channel|> <|message|> #}")
    engine.script = lambda request: (
        "<|channel|>analysis<|message|>1234<|start|>assistant<|channel|>analysis<|message|>"
        "56<|start|>assistant<|channel|>final<|message|>Yes"
    )
    answer = client.post("/v1/chat/completions", json=CHAT).json()
    assert answer["choices"][0]["message"]["reasoning"].replace("\n", "") == "123456"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}


def test_reasoning_tokens_grow_in_a_stream(thinking: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**CHAT, "stream": True, "stream_options": options}
    chunks = events(thinking.post("/v1/chat/completions", json=body).text)
    counts = [c["usage"]["completion_tokens_details"]["reasoning_tokens"] for c in chunks]
    assert (counts[0], counts[-1]) == (0, 5)
    assert max(counts) < 5 + len("</think>")  # whose beginning may be reasoning as well


def test_reasoning_that_is_cut(thinking: TestClient) -> None:
    body = {**CHAT, "max_tokens": 9}
    usage = thinking.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["completion_tokens"] == 9
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_text_completions_have_no_reasoning(client: TestClient) -> None:
    usage = client.post("/v1/completions", json=TEXT).json()["usage"]
    assert "completion_tokens_details" not in usage


def test_reasoning_tokens_of_responses(thinking: TestClient) -> None:
    whole = thinking.post("/v1/responses", json={"input": "Hi"}).json()["usage"]
    assert whole["output_tokens_details"] == {"reasoning_tokens": 5}
    streamed = thinking.post("/v1/responses", json={"input": "Hi", "stream": True})
    assert events(streamed.text)[-1]["response"]["usage"] == whole


def test_usage_of_messages(thinking: TestClient) -> None:
    """The first and last events of a stream have all counts, even before any page is cached."""
    body = {"max_tokens": 50, "messages": CHAT["messages"]}
    whole = thinking.post("/v1/messages", json=body).json()["usage"]
    assert whole["output_tokens_details"] == {"thinking_tokens": 5}
    sent = events(thinking.post("/v1/messages", json={**body, "stream": True}).text)
    start, end = sent[0]["message"]["usage"], sent[-2]["usage"]
    assert (start["cache_read_input_tokens"], start["cache_creation_input_tokens"]) == (0, 0)
    assert start["output_tokens_details"] == {"thinking_tokens": 0}
    assert end == whole
    assert end["cache_read_input_tokens"] == 3
    assert start.keys() == end.keys()


@pytest.mark.parametrize("route", ROUTES)
def test_usage_tells_which_tokens_came_from_a_disk(
    known: TestClient, engine: Any, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = engine._runs

    def loaded(request: GenerationRequest) -> Iterator[TokenDelta]:
        for delta in runs(request):
            yield msgspec.structs.replace(delta, num_cached_tokens=48, num_tier_tokens=32)

    monkeypatch.setattr(engine, "_runs", loaded)
    details = known.post(route, json=ROUTES[route]).json()["usage"]["prompt_tokens_details"]
    tiers = {"memory": 16, "disk": 32}
    assert details == {"cached_tokens": 48, "cached_tokens_by_tier": tiers}


@pytest.mark.parametrize("route", [*ROUTES, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("separates", [False, True])
def test_with_a_disk_tier_keys_share_no_prefixes(
    engine: Any, model: Any, route: str, separates: bool
) -> None:
    facts = DashboardFacts(cache=CacheFacts(separates_keys=separates))
    app: FastAPI = create_app(engine, model, ServerConfig(api_keys=("one", "two")), facts=facts)
    body: dict[str, Any] = {**ROUTES.get(route, CHAT), "max_tokens": 5}
    if route == "/v1/responses":
        body = {"input": "Hi"}
    with TestClient(app) as client:
        for key in ("one", "two", "one"):
            answer = client.post(route, json=body, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
    salts = [request.cache_salt for request in engine.submitted]
    assert salts[0] == salts[2] and (salts[0] != salts[1]) == separates
