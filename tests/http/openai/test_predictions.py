"""`prediction` and `speculation` of requests, and the counts of drafts in answers and /metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.config.sections import SpeculationConfig
from moe_serve.engine.request.draft_counts import DraftCounts, SourceCounts
from moe_serve.http.dashboard.facts import DashboardFacts

ON = DashboardFacts(speculation=SpeculationConfig(method="auto"))
OFF = DashboardFacts(speculation=SpeculationConfig(method="off"))
ASK = [{"role": "user", "content": "hi"}]
ROUTE = "/v1/chat/completions"
ANSWER = "0123456789"
MakeApp = Callable[..., FastAPI]


def chat(text: Any = ANSWER, **fields: Any) -> dict[str, Any]:
    return {"messages": ASK, "prediction": {"type": "content", "content": text}, **fields}


@pytest.fixture
def client(make_app: MakeApp, engine: Any) -> TestClient:
    """A client of a server that speculates. Steps of 4 tokens verify 4 drafted ones and accept
    3."""
    engine.script = lambda request: ANSWER
    engine.drafter, engine.tokens_per_step = "prediction", 4
    return TestClient(make_app(ON, request_metrics=True))


def test_the_engine_gets_the_tokens_and_the_prompt_stays(client: TestClient, engine: Any) -> None:
    fields = {"n": 2, "logprobs": True, "presence_penalty": 0.5}
    assert client.post(ROUTE, json=chat(**fields)).status_code == 200
    assert client.post(ROUTE, json={"messages": ASK, **fields}).status_code == 200
    first, second, *plain = engine.submitted
    expected = tuple(engine.tokenizer.encode(ANSWER, add_special_tokens=False))
    assert first.prediction == second.prediction == expected
    assert [request.prediction for request in plain] == [(), ()]
    assert first.prompt_token_ids == plain[0].prompt_token_ids
    assert first.params == plain[0].params and first.cache_salt == plain[0].cache_salt


def test_parts_are_joined_as_those_of_messages(client: TestClient, engine: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.post(ROUTE, json=chat(parts))
    assert engine.tokenizer.decode(engine.submitted[0].prediction) == "a\nb"


def test_usage_tells_what_came_true(client: TestClient) -> None:
    usage = client.post(ROUTE, json=chat()).json()["usage"]
    assert usage["completion_tokens"] == 11, "rejected tokens are not completion tokens"
    details = usage["completion_tokens_details"]
    # runs of 4, 4 and 3 tokens, the last one with the end of the text
    assert details["accepted_prediction_tokens"] == 3 + 3 + 2
    assert details["rejected_prediction_tokens"] == 3
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text = client.post(ROUTE, json=chat(**options)).text
    events = re.findall(r"^data: (\{.*)$", text, re.MULTILINE)
    streamed = json.loads(events[-1])["usage"]
    assert {**streamed, "prompt_tokens_details": 0} == {**usage, "prompt_tokens_details": 0}
    assert '"drafted"' not in text


def test_usage_without_a_prediction_has_no_counts_of_it(client: TestClient, engine: Any) -> None:
    usage = client.post(ROUTE, json={"messages": ASK}).json()["usage"]
    assert set(usage["completion_tokens_details"]) == {"reasoning_tokens"}
    engine.drafter = "ngram"
    details = client.post(ROUTE, json=chat()).json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0


def test_tokens_behind_a_stop_string_are_not_accepted(client: TestClient) -> None:
    usage = client.post(ROUTE, json=chat(stop=["5"])).json()["usage"]
    assert usage["completion_tokens"] == 6
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 3 + 2
    assert details["rejected_prediction_tokens"] == 1 + 2


def test_the_figures_of_one_request(client: TestClient) -> None:
    figures = client.post(ROUTE, json=chat()).json()["metrics"]["speculative_decoding"]
    assert figures == {
        "mean_acceptance_length": 3.667,
        "draft_acceptance_rate": 0.727,
        "num_spec_steps": 3,
        "num_draft_tokens": 11,
        "num_accepted_draft_tokens": 8,
        "acceptance_histogram": [0, 0, 1, 2],
    }
    body = {"prompt": "x", "speculation": False}
    assert client.post("/v1/completions", json=body).json()["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": None,
        "draft_acceptance_rate": None,
        "num_spec_steps": 0,
        "num_draft_tokens": 0,
        "num_accepted_draft_tokens": 0,
        "acceptance_histogram": [],
    }


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (ROUTE, chat()),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "hi", "store": False}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 9}),
    ],
)
def test_a_request_switches_its_drafts_off(
    client: TestClient, engine: Any, route: str, body: dict[str, Any]
) -> None:
    for value, may_draft in ((False, False), (True, True), (None, True)):
        response = client.post(route, json={**body, "speculation": value})
        assert response.status_code == 200, response.text
        assert engine.submitted[-1].may_draft is may_draft
    wrong = client.post(route, json={**body, "speculation": "no"})
    assert wrong.status_code == 400 and "speculation must be true or false" in wrong.text


def test_without_speculation_it_has_no_effect(make_app: MakeApp, engine: Any) -> None:
    client = TestClient(make_app(OFF, request_metrics=True))
    response = client.post(ROUTE, json=chat())
    assert response.status_code == 200 and engine.submitted[0].prediction == ()
    assert response.headers["X-Ignored-Parameters"] == "prediction"
    details = response.json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0
    assert "speculative_decoding" not in response.json()["metrics"]
    assert "spec" not in client.get("/metrics").text


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ("text", "prediction must be an object"),
        ({"type": "text", "content": "x"}, "prediction.type must be 'content', got \\\"text\\\""),
        ({"content": "x"}, "prediction.type is missing"),
        ({"type": "content"}, "prediction.content is missing"),
        ({"type": "content", "content": 3}, "prediction.content must be a string or a list"),
        ({"type": "content", "content": [3]}, "prediction.content.0 must be"),
        (
            {"type": "content", "content": [{"type": "image_url"}]},
            'as only text is served, got type \\"image_url\\"',
        ),
        ({"type": "content", "content": "x", "y": 1}, "Unknown parameter 'prediction.y'"),
        ({"type": "content", "content": "x" * 1_000_000}, "has 1000000 characters"),
    ],
)
def test_wrong_predictions(client: TestClient, prediction: Any, message: str) -> None:
    response = client.post(ROUTE, json={"messages": ASK, "prediction": prediction})
    assert response.status_code == 400 and message in response.text, response.text
    assert response.json()["error"]["param"].startswith("prediction")


def test_a_prediction_beyond_the_context_is_cut(client: TestClient, engine: Any) -> None:
    longest = 511 * 7  # no token has more than 7 bytes
    assert client.post(ROUTE, json=chat("x" * longest)).status_code == 200
    request = engine.submitted[0]
    assert len(request.prediction) == 512 - len(request.prompt_token_ids)
    refused = client.post(ROUTE, json=chat("x" * (longest + 1)))
    assert refused.status_code == 400 and "context is 512 tokens" in refused.text


def test_completions_do_not_take_one(client: TestClient) -> None:
    response = client.post(
        "/v1/completions", json={"prompt": "x", "prediction": chat()["prediction"]}
    )
    assert response.status_code == 400 and "prediction is not supported" in response.text


def test_the_counts_of_drafts_by_source(client: TestClient, engine: Any) -> None:
    grammar = SourceCounts(num_drafts=2, num_drafted=9, num_accepted=5)
    engine.drafts = DraftCounts(
        by_source={"grammar": grammar}, accepted_by_position=(2, 2, 1, *[0] * 13), drafter_s=0.25
    )
    text = client.get("/metrics").text
    assert 'moe_serve:spec_decode_num_drafts_total{model_name="tiny",source="grammar"} 2.0' in text
    assert (
        'moe_serve:spec_decode_num_draft_tokens_total{model_name="tiny",source="grammar"} 9.0'
        in text
    )
    accepted = "moe_serve:spec_decode_num_accepted_tokens"
    assert f'{accepted}_total{{model_name="tiny",source="grammar"}} 5.0' in text
    assert f'{accepted}_total{{model_name="tiny",source="suffix"}} 0.0' in text
    assert f'{accepted}_per_pos_total{{model_name="tiny",position="2"}} 1.0' in text
    assert 'moe_serve:speculation_drafter_seconds_total{model_name="tiny"} 0.25' in text
