"""Service tiers from the HTTP field to the engine and back: refusals, ends, counts, checked
names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from starlette.testclient import TestClient

from moe_serve.config.sections import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import build_engine
from moe_serve.http.app import create_app
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.tokenizer import Tokenizer

TEXT = "/v1/completions"
TIERS = (
    TierConfig(name="interactive", weight=4.0, ttft_s=3600.0),
    TierConfig(name="flex", e2e_s=3600.0, max_output_tokens=3),
)


@pytest.fixture
def client() -> Iterator[TestClient]:
    """A new server of the demonstration model, with targets that every machine meets."""
    config = EngineConfig(
        model=ModelConfig(num_threads=1),
        cache=CacheConfig(num_pages=128),
        scheduler=SchedulerConfig(max_num_seqs=2, tiers=TIERS),
    )
    with closing(AsyncEngine(build_engine(config), config.scheduler)) as engine:
        model = ServedModel(
            name="demo",
            tokenizer=Tokenizer.load(demo_model_folder()),
            chat_template=None,
            created=0,
            max_model_len=engine.max_model_len,
        )
        keys = ("one tenant=acme tighten=yes", "two tier=flex")
        server = ServerConfig(api_keys=keys)
        app = create_app(engine, model, server, scheduler=config.scheduler)
        with TestClient(app, headers={"authorization": "Bearer one"}) as test_client:
            yield test_client


def test_tiers_and_tenants_are_counted_under_the_operators_names(client: TestClient) -> None:
    body = {"prompt": "The king", "max_tokens": 9, "ignore_eos": True, "user": "mallory"}
    first = client.post(TEXT, json=body).json()
    assert (first["service_tier"], first["usage"]["completion_tokens"]) == ("interactive", 9)
    other = {"authorization": "Bearer two"}
    second = client.post(TEXT, json=body, headers=other).json()
    assert (second["service_tier"], second["usage"]["completion_tokens"]) == ("flex", 3)
    page = client.get("/metrics").text
    for tier in ("interactive", "flex"):
        assert f'tier_good_requests_total{{model_name="demo",tier="{tier}"}} 1.0' in page
    assert 'tenant="acme",tier="interactive"' in page and "mallory" not in page
    state = client.get("/dashboard/state").json()["service"]
    assert [tier["name"] for tier in state["tiers"]] == ["interactive", "flex"]


def test_what_cannot_be_met_is_refused_and_what_is_late_is_ended(client: TestClient) -> None:
    """No machine answers within a tenth of a millisecond. The first request is not refused, because
    no step was measured yet."""
    late = {"prompt": "a", "max_tokens": 3, "service_tier": "flex"}
    late |= {"slo": {"deadline_ms": 0.1, "strict": True}}
    ended = client.post(TEXT, json=late)
    assert (ended.status_code, ended.json()["error"]["code"]) == (504, "deadline_exceeded")
    answered = client.post(TEXT, json={"prompt": "a", "max_tokens": 4})  # steps are measured
    assert answered.status_code == 200
    slo = {"ttft_ms": 0.1, "strict": True}
    refused = client.post(TEXT, json={"prompt": "a", "max_tokens": 2, "slo": slo})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (429, "deadline_unmeetable")
    assert error["predicted_ttft_ms"] >= error["target_ttft_ms"] == 0.1
    assert int(refused.headers["retry-after-ms"]) >= 100
    assert client.post(TEXT, json=late).json()["error"]["code"] == "deadline_unmeetable"
    page = client.get("/metrics").text
    assert 'tier_refused_total{model_name="demo",tier="interactive"} 1.0' in page
    assert 'tier_expired_total{model_name="demo",tier="flex"} 1.0' in page
    assert 'finished_reason="error"' not in page, "alerts watch faults of the server"
    assert client.get("/health/ready").json()["last_error"] is None
    assert client.post(TEXT, json={"prompt": "a", "max_tokens": 2}).status_code == 200
