"""return_routed_experts: each token's experts come with the token, streamed or whole."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from moe_serve.config.sections import ServerConfig
from moe_serve.engine.request.request import TokenExperts
from moe_serve.http.app import create_app
from moe_serve.http.generation.logprob_format import routed_fields
from moe_serve.text.tokenizer import Tokenizer

COMPLETION = "/v1/completions", {"prompt": "ab"}
CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}
ROUTES = [COMPLETION, CHAT]


def experts(place: int) -> list[list[int]]:
    """See `_experts` of conftest.py."""
    return [[place, 100], [101, place]]


def post(client: TestClient, route: tuple[str, dict[str, Any]], **fields: Any) -> Any:
    path, body = route
    return client.post(path, json={**body, "return_routed_experts": True, **fields})


def streamed(client: TestClient, route: tuple[str, dict[str, Any]], **fields: Any) -> Any:
    """Returns the chunks' choices with experts, and the others."""
    events = post(client, route, stream=True, **fields).text.split("\n\n")
    choices = [json.loads(e[6:])["choices"][0] for e in events if e.startswith("data: {")]
    return [c for c in choices if "routed_experts" in c], [
        c for c in choices if "routed_experts" not in c
    ]


@pytest.mark.parametrize("route", ROUTES)
def test_a_whole_answer_has_an_entry_for_each_token(client: TestClient, route: Any) -> None:
    (choice,) = post(client, route).json()["choices"]
    tokens = ["H", "e", "l", "l", "o", "<|end|>"]
    assert choice["routed_tokens"] == tokens
    assert choice["routed_experts"] == [experts(i) for i in range(len(tokens))]


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_has_them_with_each_token(client: TestClient, route: Any) -> None:
    carrying, others = streamed(client, route)
    told = [e for choice in carrying for e in choice["routed_experts"]]
    assert told == [experts(i) for i in range(6)]
    assert [t for c in carrying for t in c["routed_tokens"]][:5] == list("Hello")
    assert others[-1]["finish_reason"] == "stop"


def test_drafted_tokens_name_their_drafter(tokenizer: Tokenizer) -> None:
    ids = TokenExperts(bytes([3, 4]), 1, 2)
    fields = routed_fields((replace(ids, drafter="ngram"), ids), (72, 101), tokenizer)
    assert json.loads(bytes(fields["routed_drafts"])) == ["ngram", None]
    assert "routed_drafts" not in routed_fields((ids, ids), (72, 101), tokenizer)


def test_a_token_without_text_has_its_chunk(client: TestClient, engine: Any) -> None:
    """The bytes of one character arrive one by one."""
    engine.script = lambda request: "é"
    carrying, _ = streamed(client, COMPLETION)
    assert [e for c in carrying for e in c["routed_experts"]] == [experts(i) for i in range(3)]
    assert "".join(c["text"] for c in carrying) == "é"


@pytest.mark.parametrize("route", ROUTES)
def test_every_choice_has_its_own(client: TestClient, route: Any) -> None:
    choices = post(client, route, n=3, max_tokens=2).json()["choices"]
    assert [len(c["routed_experts"]) for c in choices] == [2, 2, 2]
    carrying, _ = streamed(client, route, n=2, max_tokens=2)
    by_index = {i: [c for c in carrying if c["index"] == i] for i in (0, 1)}
    for own in by_index.values():
        assert [e for c in own for e in c["routed_experts"]] == [experts(0), experts(1)]


@pytest.mark.parametrize("route", ROUTES)
def test_tokens_behind_a_stop_string_do_not_count(client: TestClient, route: Any) -> None:
    (choice,) = post(client, route, stop="ll").json()["choices"]
    assert choice["routed_tokens"] == ["H", "e", "l", "l"]
    assert choice["routed_experts"] == [experts(i) for i in range(4)]


@pytest.mark.parametrize("route", ROUTES)
def test_nobody_asks_and_nothing_is_told(client: TestClient, engine: Any, route: Any) -> None:
    (choice,) = post(client, route, return_routed_experts=False).json()["choices"]
    assert "routed_experts" not in choice and "routed_tokens" not in choice
    assert not engine.submitted[0].wants_routed_experts
    response = post(client, route, return_routed_experts="yes")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "return_routed_experts"


@pytest.mark.parametrize("route", ROUTES)
def test_a_whole_answer_is_bounded_and_a_stream_is_not(engine: Any, model: Any, route: Any) -> None:
    large = replace(model, ids_per_token=100_000)
    with TestClient(create_app(engine, large, ServerConfig())) as client:
        response = post(client, route, max_tokens=300)
        assert response.status_code == 400
        error = response.json()["error"]
        assert "30000000 ids; an answer without stream is limited to 16000000" in error["message"]
        assert post(client, route, max_tokens=100).status_code == 200
        carrying, _ = streamed(client, route, max_tokens=300)
        assert carrying
