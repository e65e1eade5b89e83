"""The field `kv_window`: permissions, refusals, and the usage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from moe_serve.config.sections import ServerConfig
from moe_serve.engine.request.kv_window import KVWindow, KVWindowRules
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.errors import InvalidRequestError
from moe_serve.http.app import create_app

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {**CHAT, "max_tokens": 5},
}
WINDOW = {"window": 64, "sinks": 8}


@pytest.fixture
def allowed(engine: Any, model: Any) -> Iterator[TestClient]:
    rules = KVWindowRules(is_allowed=True, page_size=16, widest=48)
    with TestClient(create_app(engine, replace(model, kv_windows=rules), ServerConfig())) as client:
        yield client


@pytest.mark.parametrize("route", ROUTES)
def test_the_operator_has_to_allow_it(client: TestClient, route: str) -> None:
    answer = client.post(route, json={**ROUTES[route], "kv_window": WINDOW})
    assert answer.status_code == 400
    assert "cache.allow_kv_window" in answer.json()["error"]["message"]
    assert client.post(route, json={**ROUTES[route], "kv_window": None}).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_the_engine_gets_it(allowed: TestClient, engine: Any, route: str) -> None:
    answer = allowed.post(route, json={**ROUTES[route], "kv_window": WINDOW})
    assert answer.status_code == 200, answer.text
    (request,) = engine.submitted
    assert request.params.kv_window == KVWindow(window=64, sinks=8)
    assert not request.drafts, "drafted rows would see other pages than the next one"


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"window": 47}, "at least the model's own window (48 tokens), got 47"),
        ({"window": 0}, "kv_window.window must be an integer in [1, 2147483647], got 0"),
        ({"window": 64, "sinks": -1}, "kv_window.sinks must be an integer in [0, 2147483647]"),
        ({"window": 64, "size": 3}, "may only have the fields window and sinks, got 'size'"),
        ({"window": "64"}, "kv_window.window must be an integer"),
        ({"sinks": 4}, "kv_window.window"),
        (64, "kv_window must be an object"),
    ],
)
def test_bad_input_gets_a_sentence(allowed: TestClient, wish: object, why: str) -> None:
    answer = allowed.post("/v1/chat/completions", json={**CHAT, "kv_window": wish})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


def test_models_that_attend_within_chunks_have_none() -> None:
    rules = KVWindowRules(is_allowed=True, has_chunks=True)
    with pytest.raises(InvalidRequestError, match="no meaning for this model"):
        rules.check(KVWindow(window=64))
    rules.check(None)
    with pytest.raises(InvalidRequestError, match="the size of a page .16 tokens., got 15"):
        KVWindowRules(is_allowed=True).check(KVWindow(window=15))


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_usage_tells_how_many_tokens_were_dropped(
    allowed: TestClient, engine: Any, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = engine._runs

    def dropping(request: GenerationRequest) -> Iterator[TokenDelta]:
        for index, delta in enumerate(runs(request)):
            yield msgspec.structs.replace(delta, num_dropped_tokens=16 * min(index, 2))

    monkeypatch.setattr(engine, "_runs", dropping)
    body = {**ROUTES[route], "max_tokens": 8, "kv_window": WINDOW, "n": 2}
    usage = allowed.post(route, json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["kv_dropped_tokens"] == 64, "32 in each choice"
    plain = allowed.post(route, json=ROUTES[route]).json()["usage"]
    assert "kv_dropped_tokens" not in plain["prompt_tokens_details"]
    metrics = allowed.get("/metrics").text
    assert 'kv_window_requests_total{model_name="tiny"} 2.0' in metrics
    assert 'kv_window_dropped_tokens_total{model_name="tiny"} 64.0' in metrics
    found = allowed.get("/dashboard/state").json()["kv"]["window"]
    assert found == {"requests": 2, "dropped_pages": 4}, found
