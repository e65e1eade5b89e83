"""Metric names that vLLM's dashboards need: of a real engine with few pages, and of given
snapshots."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from moe_serve.config.sections import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.opened_model import model_folder
from moe_serve.engine.request.stats import EngineCounts, EngineLoad
from moe_serve.http.app import create_app
from moe_serve.http.dashboard.facts import dashboard_facts
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.text.tokenizer import Tokenizer

OF = EngineConfig(
    model=ModelConfig(max_model_len=128, num_threads=1),
    cache=CacheConfig(num_pages=10, metrics_sample=1.0),
    scheduler=SchedulerConfig(max_num_seqs=4),
)


def values(text: str, prefix: str = "moe_serve:") -> dict[str, float]:
    """Returns {name{reason, source or nothing}: value} of all samples but buckets."""
    return {
        sample.name.removeprefix(prefix)
        + (sample.labels.get("reason") or sample.labels.get("source") or ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(prefix) and not sample.name.endswith("_bucket")
    }


@pytest.fixture(scope="module")
def built() -> BuiltEngine:
    return build_engine(OF)


@pytest.fixture(scope="module")
def real(built: BuiltEngine) -> Iterator[TestClient]:
    engine, folder = AsyncEngine(built, OF.scheduler), model_folder(OF.model)
    model = ServedModel(
        name="demo",
        tokenizer=Tokenizer.load(folder),
        chat_template=None,
        created=0,
        max_model_len=engine.max_model_len,
    )
    facts = dashboard_facts(built, OF)
    app = create_app(engine, model, ServerConfig(metrics_alias="vllm"), facts=facts)
    with TestClient(app) as client:
        yield client
    app.state.gate.close()
    engine.close()


def test_of_a_real_engine(real: TestClient, built: BuiltEngine) -> None:
    names = {
        *("corrupted_requests_total", "num_requests_waiting_by_reasoncapacity"),
        *("num_requests_waiting_by_reasondeferred", "request_num_preemptions_sum"),
        *("prompt_tokens_by_source_totallocal_compute", "request_num_preemptions_count"),
        *("prompt_tokens_by_source_totallocal_cache_hit", "kv_block_lifetime_seconds_count"),
        *("kv_block_idle_before_evict_seconds_count", "kv_block_reuse_gap_seconds_count"),
        *("request_prefill_kv_computed_tokens_count", "request_prefill_kv_computed_tokens_sum"),
    }
    before = values(real.get("/metrics").text)
    assert {name: before[name] for name in names} == dict.fromkeys(names, 0.0), "from the start"
    body: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
    for prompt in ([*range(300, 340)], [*range(400, 440)], [*range(300, 340)]):
        sent = {**body, "prompt": prompt, "n": 3, "temperature": 1, "seed": 3}
        assert real.post("/v1/completions", json=sent).status_code == 200
    text = real.get("/metrics").text
    found = values(text)
    computed = found["prompt_tokens_by_source_totallocal_compute"]
    hits = found["prompt_tokens_by_source_totallocal_cache_hit"]
    assert computed + hits == found["request_prompt_tokens_sum"] == 9 * 40
    assert hits == found["prefix_cache_hits_total"] >= 6 * 32
    assert computed == found["request_prefill_kv_computed_tokens_sum"]
    assert found["num_preemptions_total"] > 0
    assert found["request_num_preemptions_sum"] == found["num_preemptions_total"]
    assert found["request_num_preemptions_count"] == 9
    assert found["prefix_cache_evictions_total"] > 0
    for name in ("kv_block_lifetime_seconds_count", "kv_block_idle_before_evict_seconds_count"):
        assert found[name] == found["prefix_cache_evictions_total"], name
    assert found["kv_block_reuse_gap_seconds_count"] > 0
    assert found["corrupted_requests_total"] == 0
    generated = found["generation_tokens_total"]
    assert found["iteration_tokens_total_sum"] == found["prompt_tokens_total"] + generated
    vllm = values(text, "vllm:")
    assert {name: vllm[name] for name in names} == {name: found[name] for name in names}
    labels = f'block_size="16",cache_dtype="{built.layout.dtype}",enable_prefix_caching="True",'
    assert f'vllm:cache_config_info{{{labels}engine="0",' in text


def test_who_waits_by_reason(
    client: TestClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two reasons add up to all waiting requests in every snapshot."""
    stats = engine.stats()
    for num_waiting, num_left_aside, expected in ((5, 2, (3, 2)), (1, 2, (0, 1)), (0, 0, (0, 0))):
        load = EngineLoad(num_waiting=num_waiting, num_left_aside=num_left_aside)
        now = dataclasses.replace(stats, load=load)
        monkeypatch.setattr(engine, "stats", lambda now=now: now)
        found = values(client.get("/metrics").text)
        name = "num_requests_waiting_by_reason"
        assert (found[f"{name}capacity"], found[f"{name}deferred"]) == expected
        assert found["num_requests_waiting"] == sum(expected)


def test_corrupted_requests(
    client: TestClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = dataclasses.replace(engine.stats(), counts=EngineCounts(num_corrupted=3))
    monkeypatch.setattr(engine, "stats", lambda: now)
    assert values(client.get("/metrics").text)["corrupted_requests_total"] == 3.0
