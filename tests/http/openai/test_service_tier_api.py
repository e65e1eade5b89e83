"""Tiers, targets and forecasts on every route: echoed fields, refusals, and headers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.config.sections import SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.first_token import FirstTokenForecast, Refusal
from moe_serve.engine.request.service_terms import Service, Targets

MakeApp = Callable[..., FastAPI]
TIERS = SchedulerConfig(
    tiers=(
        TierConfig(name="interactive", weight=4.0, ttft_s=1.0),
        TierConfig(name="flex", e2e_s=600.0, is_sheddable=True, max_output_tokens=2),
    )
)
JSON = {"content-type": "application/json"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/invocations": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
}


@dataclass
class FakeAdmission:
    """Predicts `predicted_s` for every request, and refuses those above their target."""

    predicted_s: float = 0.25
    asked: list[tuple[Service, int, int]] = field(default_factory=list)

    def forecast(
        self, service: Service, num_prompt_tokens: int, priority: int = 0
    ) -> FirstTokenForecast:
        return FirstTokenForecast(predicted_s=self.predicted_s, p90_s=2 * self.predicted_s)

    def check(self, service: Service, num_prompt_tokens: int, priority: int = 0) -> Refusal | None:
        self.asked.append((service, num_prompt_tokens, priority))
        target = service.targets.ttft_s
        if not service.targets.is_strict or target is None or 2 * self.predicted_s <= target:
            return None
        return Refusal(
            predicted_ttft_s=2 * self.predicted_s,
            target_ttft_s=target,
            retry_after_s=2 * self.predicted_s - target,
        )


def tier_in(path: str, answer: dict[str, Any]) -> str | None:
    return (answer["usage"] if path == "/v1/messages" else answer).get("service_tier")


@pytest.fixture(scope="module")
def shared(new_client: Any) -> Iterator[tuple[TestClient, Any]]:
    client, engine = new_client(scheduler=TIERS)
    with client:  # one event loop for all requests
        yield client, engine


@pytest.fixture
def engine(shared: Any) -> Any:
    """One engine for all tests, reset before each."""
    engine = shared[1]
    engine.submitted.clear()
    engine.admission = engine.error_after = engine.error_code = None
    engine.max_requests = 1000
    return engine


@pytest.fixture
def tiered(shared: Any, engine: Any) -> TestClient:
    client: TestClient = shared[0]
    return client


@pytest.mark.parametrize("path", ROUTES)
def test_the_tier_reaches_the_engine_and_is_echoed(
    tiered: TestClient, engine: Any, path: str
) -> None:
    for asked, given in ((None, "interactive"), ("auto", "interactive"), ("flex", "flex")):
        answer = tiered.post(path, json={**ROUTES[path], "service_tier": asked})
        assert answer.status_code == 200, answer.text
        assert tier_in(path, answer.json()) == given
        assert engine.submitted[-1].service.tier == given
        assert "x-ignored-parameters" not in answer.headers
    assert engine.submitted[-1].service.targets == Targets(e2e_s=600.0)
    assert engine.submitted[-1].rules.max_tokens == 2, "the limit of tier flex"


def test_anthropics_name_of_the_default_tier(tiered: TestClient) -> None:
    body = {**ROUTES["/v1/messages"], "service_tier": "standard_only"}
    assert tier_in("/v1/messages", tiered.post("/v1/messages", json=body).json()) == "interactive"


@pytest.mark.parametrize("path", ROUTES)
def test_streams_echo_the_tier(tiered: TestClient, path: str) -> None:
    body = {**ROUTES[path], "service_tier": "flex", "stream": True}
    text = tiered.post(path, json=body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == "/v1/messages":
        told = [events[0]["message"]["usage"], events[-2]["usage"]]
    elif path == "/v1/responses":
        told = [event["response"] for event in (events[0], events[-1])]
    else:
        told = events
    assert len(told) >= 2 and {each.get("service_tier") for each in told} == {"flex"}


def test_an_answer_is_cut_at_the_limit_of_its_tier(tiered: TestClient) -> None:
    body = {**ROUTES["/v1/completions"], "service_tier": "flex"}
    choice = tiered.post("/v1/completions", json={**body, "max_tokens": 30}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("He", "length")
    few = tiered.post("/v1/completions", json={**body, "max_tokens": 1}).json()["choices"][0]
    assert few["text"] == "H"
    refused = tiered.post("/v1/completions", json={**body, "max_tokens": 9, "min_tokens": 3})
    assert refused.status_code == 400
    assert (
        "must not exceed 2, the longest answer of tier flex" in refused.json()["error"]["message"]
    )


@pytest.mark.parametrize("path", ROUTES)
def test_without_tiers_nothing_changes_but_the_echo(
    make_app: MakeApp, engine: Any, path: str
) -> None:
    client = TestClient(make_app())
    plain = client.post(path, json=ROUTES[path])
    assert tier_in(path, plain.json()) == ("default" if path == "/v1/responses" else None)
    assert "x-predicted-ttft-ms" not in plain.headers
    named = client.post(path, json={**ROUTES[path], "service_tier": "priority"})
    assert tier_in(path, named.json()) == "default"
    assert named.headers["x-ignored-parameters"] == "service_tier"
    assert engine.submitted[0].service == engine.submitted[1].service == Service()


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"service_tier": "gold"}, "service_tier", "one of auto, interactive, flex"),
    ({"service_tier": 3}, "service_tier", "must be a string"),
    ({"service_tier": "x" * 65}, "service_tier", "at most 64"),
    ({"slo": {"ttft_ms": 10}}, "slo.ttft_ms", "at least 1000 for this client"),
    ({"slo": {"ttft_ms": "10"}}, "slo.ttft_ms", "must be a number"),
    ({"slo": {"ttft_ms": True}}, "slo.ttft_ms", "must be a number"),
    ({"slo": {"ttft_ms": -1}}, "slo.ttft_ms", "greater than or equal to 0.1"),
    ({"slo": {"tpot_ms": 0}}, "slo.tpot_ms", "greater than or equal to 0.1"),
    ({"slo": {"deadline_ms": 1e12}}, "slo.deadline_ms", "less than or equal to 604800000"),
    ({"slo": {"deadline_ms": 10**400}}, "slo.deadline_ms", "must be a"),
    ({"slo": {"strict": 1}}, "slo.strict", "must be true or false"),
    ({"slo": 5}, "slo", "must be an object"),
    ({"slo": {"ttft_ms": 3000, "deadline_ms": 2000}}, "slo.deadline_ms", "below slo.ttft_ms"),
    ({"slo": {"ttft": 3000}}, "slo.ttft", "Unknown parameter"),
    ({"stage": "plan"}, "stage", "requires workflow"),
    ({"workflow": "a b"}, "workflow", "pattern"),
    ({"workflow": "w" * 65}, "workflow", "pattern"),
    ({"workflow": "w", "stage": ""}, "stage", "pattern"),
]


@pytest.mark.parametrize("path", ROUTES)
def test_wrong_fields_are_refused_on_every_route(
    tiered: TestClient, engine: Any, path: str
) -> None:
    for fields, param, words in WRONG:
        body = json.dumps({**ROUTES[path], **fields})
        answer = tiered.post(path, content=body, headers=JSON)
        error = answer.json()["error"]
        details = error.get("details", error)
        assert (answer.status_code, details["param"]) == (400, param), answer.text
        assert words in error["message"]
    assert not engine.submitted


def test_numbers_that_are_none_are_refused(tiered: TestClient) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = f'{{"prompt": "hi", "slo": {{"ttft_ms": {number}}}}}'
        answer = tiered.post("/v1/completions", content=body, headers=JSON)
        assert answer.status_code == 400


def test_a_workflow_and_its_deadline_reach_the_engine(make_app: MakeApp, engine: Any) -> None:
    client = TestClient(make_app(scheduler=TIERS, key_may_tighten=True))
    body = {"workflow": "agent/7", "stage": "plan", "slo": {"deadline_ms": 9000, "strict": True}}
    answer = client.post("/v1/completions", json={"prompt": "hi", **body})
    assert answer.status_code == 200, answer.text
    service = engine.submitted[-1].service
    assert (service.workflow, service.stage) == ("agent/7", "plan")
    assert service.targets == Targets(ttft_s=1.0, e2e_s=9.0, is_strict=True)


def test_headers_of_llm_d_set_targets(make_app: MakeApp, engine: Any) -> None:
    client = TestClient(make_app(scheduler=TIERS, key_may_tighten=True))
    headers = {"x-slo-ttft-ms": "200", "X-SLO-TPOT-MS": "50.5"}
    for path, body in ROUTES.items():
        assert client.post(path, json=body, headers=headers).status_code == 200
        targets = engine.submitted[-1].service.targets
        assert (targets.ttft_s, targets.tpot_s) == (0.2, 0.0505)
    refused = client.post(
        "/v1/completions", json={"prompt": "a"}, headers={"x-slo-ttft-ms": "soon"}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-slo-ttft-ms")


def test_the_user_is_a_tenant_if_there_are_no_keys(make_app: MakeApp, engine: Any) -> None:
    client = TestClient(make_app(scheduler=TIERS))
    for path, body in ROUTES.items():
        is_messages = path == "/v1/messages"
        named = {"metadata": {"user_id": "ann"}} if is_messages else {"user": "ann"}
        answer = client.post(path, json={**body, **named})
        assert engine.submitted[-1].service.tenant == "user:ann"
        assert "x-ignored-parameters" not in answer.headers
    assert client.post("/v1/completions", json={"prompt": "a", "user": 3}).status_code == 400


def test_settings_of_a_key_decide(make_app: MakeApp, engine: Any) -> None:
    keys = ("s3cret tier=flex,interactive tenant=acme tighten=yes", "other tier=flex", "plain")
    client = TestClient(make_app(scheduler=TIERS, api_keys=keys))

    def service(key: str, **fields: Any) -> Service | None:
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": "hi", "user": "ann", **fields}
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert answer.headers.get("x-ignored-parameters") == "user" or answer.status_code == 400
        return engine.submitted[-1].service if answer.status_code == 200 else None

    first = service("s3cret", slo={"deadline_ms": 5000})
    assert first is not None and (first.tier, first.tenant) == ("flex", "acme")
    assert first.targets.e2e_s == 5.0
    assert service("other", service_tier="interactive") is None
    assert service("other", slo={"deadline_ms": 5000}) is None
    plain = service("plain")
    assert plain is not None and plain.tenant.startswith("key:") and len(plain.tenant) == 16


@pytest.mark.parametrize("path", ROUTES)
def test_a_refusal_says_what_was_expected_and_when_to_come_back(
    make_app: MakeApp, engine: Any, path: str
) -> None:
    client = TestClient(make_app(scheduler=TIERS, overload_status=503))
    engine.admission = FakeAdmission(predicted_s=1.2)
    answer = client.post(path, json={**ROUTES[path], "slo": {"strict": True}})
    error = answer.json()["error"]
    details = error.get("details", error)
    code = details["error_code"] if path == "/v1/messages" else details["code"]
    assert (answer.status_code, code) == (429, "deadline_unmeetable")
    assert (details["predicted_ttft_ms"], details["target_ttft_ms"]) == (2400, 1000)
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1400")
    assert error["type"] == "rate_limit_error" and "after 2400 ms" in error["message"]
    assert not engine.submitted
    page = client.get("/metrics").text
    assert 'admission_rejections_total{model_name="tiny",reason="deadline_unmeetable"} 1.0' in page


@pytest.mark.parametrize("path", ROUTES)
def test_an_accepted_answer_says_when_its_first_token_is_expected(
    tiered: TestClient, engine: Any, path: str
) -> None:
    engine.admission = FakeAdmission(predicted_s=0.25)
    for is_streamed in (False, True):
        body = {**ROUTES[path], "stream": is_streamed, "slo": {"strict": True}}
        answer = tiered.post(path, json=body)
        assert (answer.status_code, answer.headers["x-predicted-ttft-ms"]) == (200, "250")


def test_every_sequence_is_checked(tiered: TestClient, engine: Any) -> None:
    engine.admission = FakeAdmission()
    body = {"prompt": ["a", "bcd"], "n": 2, "priority": 3}
    assert tiered.post("/v1/completions", json=body).status_code == 200
    assert [(n, priority) for _, n, priority in engine.admission.asked] == [
        (1, 3), (1, 3), (3, 3), (3, 3)
    ]  # fmt: skip


def test_a_full_queue_says_how_long_it_is(tiered: TestClient, engine: Any) -> None:
    engine.max_requests = 0
    for predicted_s, seconds in ((None, "1"), (0.01, "1"), (7.3, "8"), (1e9, "60")):
        engine.admission = None if predicted_s is None else FakeAdmission(predicted_s)
        answer = tiered.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, seconds)
        assert answer.json()["error"]["code"] == "server_overloaded"
    assert answer.headers["retry-after-ms"] == "60000"


@pytest.mark.parametrize("path", ROUTES)
def test_a_missed_deadline_ends_the_answer_with_its_own_error(
    tiered: TestClient, engine: Any, path: str
) -> None:
    engine.error_code = "deadline_exceeded"
    engine.error_after = 0
    answer = tiered.post(path, json=ROUTES[path])
    error = answer.json()["error"]
    assert answer.status_code == 504, "nothing was sent yet"
    assert error.get("details", {}).get("error_code", error.get("code")) == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"
    engine.error_after = 2
    text = tiered.post(path, json={**ROUTES[path], "stream": True}).text
    assert "The answer has missed its deadline" in text
