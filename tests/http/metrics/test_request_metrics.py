"""The times of requests by stage, under vLLM's names, and a page of bounded size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from moe_serve.cache.tiers.store import TierStats
from moe_serve.config.sections import SpeculationConfig
from moe_serve.engine.request.request import FinishReason, GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.step_tokens import StepTokenCounter, StepTokens
from moe_serve.http.dashboard.facts import DashboardFacts
from moe_serve.http.metrics.finished_sequence import FinishedSequence
from moe_serve.http.metrics.metrics import ServerMetrics
from moe_serve.http.metrics.table import METRICS
from tests.support.adapters.small_registry import small_registry
from tests.support.sampled_cases import EVERY_CASE

Samples = dict[str, float]


def samples(text: str) -> Samples:
    """Returns {name{labels without the model's}: value} of all samples but buckets."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "le")}
            if not sample.name.endswith("_bucket"):
                shown = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
                found[f"{sample.name}{{{shown}}}"] = sample.value
    return found


def observed(metrics: ServerMetrics) -> Samples:
    """Returns {name{}: value} of the histograms of requests and the counters."""
    return {
        f"{sample.name}{{{sample.labels.get('finished_reason', '')}}}": sample.value
        for row in METRICS
        for family in metrics.collect(row.name)
        for sample in family.samples
    }


def finished(**changes: Any) -> FinishedSequence:
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(n=2, max_tokens=9),
        arrival_time=100.0,
    )
    values: dict[str, Any] = {
        "request": request, "reason": FinishReason.LENGTH, "num_tokens": 5, "num_cached_tokens": 0,
        "started": 102.0, "first_token": 105.0, "ended": 113.0,
    }  # fmt: skip
    return FinishedSequence(**{**values, **changes})


def test_the_times_of_a_request() -> None:
    metrics = ServerMetrics("m")
    metrics.observe_finished(finished())
    found = observed(metrics)
    sums = {
        "request_queue_time_seconds": 2.0,
        "request_prefill_time_seconds": 3.0,
        "request_decode_time_seconds": 8.0,
        "request_inference_time_seconds": 11.0,
        "request_time_per_output_token_seconds": 2.0,  # 8 s for the 4 after the first
        "request_prompt_tokens": 3.0,
        "request_generation_tokens": 5.0,
        "request_params_n": 2.0,
        "request_params_max_tokens": 9.0,
        "e2e_request_latency_seconds": 13.0,
    }
    assert {name: found[f"moe_serve:{name}_sum{{}}"] for name in sums} == sums
    assert found["moe_serve:request_success_total{length}"] == 1.0


def test_what_is_not_known_is_not_observed() -> None:
    metrics = ServerMetrics("m")
    reason = FinishReason.ERROR
    metrics.observe_finished(finished(started=None, first_token=None, num_tokens=0, reason=reason))
    metrics.observe_finished(finished(num_tokens=1))
    found = observed(metrics)
    counts = {name: found[f"moe_serve:request_{name}_count{{}}"] for name in ("queue_time_seconds",
        "prefill_time_seconds", "time_per_output_token_seconds", "prompt_tokens")}  # fmt: skip
    assert list(counts.values()) == [1.0, 1.0, 0.0, 2.0]


def test_through_the_server(client: TestClient, engine: Any) -> None:
    client.post("/v1/completions", json={"prompt": "hi", "n": 3, "max_tokens": 2})
    counter = StepTokenCounter()
    for num_tokens in (0, 1, 2, 8, 9, 20_000):
        counter.count(num_tokens)
    engine.step_tokens = counter.snapshot()
    text = client.get("/metrics").text
    found = samples(text)
    assert found["moe_serve:request_queue_time_seconds_count{}"] == 3.0
    assert found["moe_serve:request_params_n_count{}"] == 1.0, "of each prompt"
    assert (
        found[
            "moe_serve:cache_config_info{block_size=16,cache_dtype=auto,enable_prefix_caching=True,kv_cache_size_tokens=160,num_gpu_blocks=10}"
        ]
        == 1.0
    )
    route = "moe_serve:http_request_duration_seconds_count{route=/v1/completions}"
    assert found[route] == 1.0
    assert found["moe_serve:iteration_tokens_total_sum{}"] == 20_020.0
    for bound, num_steps in (("1.0", 1), ("8.0", 3), ("16.0", 4), ("16384.0", 4), ("+Inf", 5)):
        line = f'iteration_tokens_total_bucket{{le="{bound}",model_name="tiny"}} {num_steps}.0'
        assert f"moe_serve:{line}" in text, line


def test_the_longest_choice_of_a_prompt(client: TestClient, engine: Any) -> None:
    engine.script = lambda request: "x" * (3 + 4 * request.choice)
    name = "moe_serve:request_max_num_generation_tokens"
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 20}
    client.post("/v1/completions", json=body)
    found = samples(client.get("/metrics").text)
    longest = 3 + 4 * 1 + 1  # the end of the text, too
    assert (found[name + "_count{}"], found[name + "_sum{}"]) == (2.0, 2.0 * longest)
    assert found["moe_serve:prompt_tokens_cached_total{}"] == 30.0


def test_step_tokens_add_up() -> None:
    one, two = StepTokenCounter(), StepTokenCounter()
    one.count(5)
    two.count(5)
    two.count(600)
    both = one.snapshot() + two.snapshot() + StepTokens()
    assert (both.num_tokens, sum(both.num_steps), both.num_steps[1]) == (610, 3, 2)


def test_a_client_that_hangs_up_is_counted(make_app: Callable[..., FastAPI], engine: Any) -> None:
    engine.at_readers_pace = True
    app = make_app()

    async def hang_up() -> None:
        params = SamplingParams(max_tokens=50)
        request = GenerationRequest(request_id="r", prompt_token_ids=(1,), params=params)
        generation = app.state.generations.start([request])
        async for _ in generation:
            break
        generation.close()
        generation.close()

    asyncio.run(hang_up())
    text = TestClient(app).get("/metrics").text
    assert samples(text)["moe_serve:request_success_total{finished_reason=abort}"] == 1.0


def test_a_disk_of_ranks_shows_their_memory_too(
    make_app: Callable[..., FastAPI], engine: Any
) -> None:
    memory = TierStats(name="memory", where="shared memory", num_pages=3, loads={"hit": 2})
    engine.tier = TierStats(name="disk", where="kv", num_pages=7, hit_tokens=5, memory=memory)
    found = samples(TestClient(make_app()).get("/metrics").text)
    assert found["moe_serve:kv_tier_pages{tier=disk}"] == 7
    assert found["moe_serve:kv_tier_pages{tier=memory}"] == 3
    assert found["moe_serve:kv_tier_loads_total{result=hit,tier=memory}"] == 2
    assert found["moe_serve:external_prefix_cache_hits_total{}"] == 5


def test_the_alias(make_app: Callable[..., FastAPI], engine: Any) -> None:
    engine.tier = TierStats(name="disk", where="folder")
    facts = DashboardFacts(speculation=SpeculationConfig(method="auto"))
    client = TestClient(make_app(facts, adapters=small_registry(), metrics_alias="vllm"))
    client.post("/v1/completions", json={"prompt": "hi"})
    client.app.state.generations._metrics.count_rejection("queue_full")  # type: ignore[attr-defined]
    text = client.get("/metrics").text
    found = samples(text)
    own = {name: value for name, value in found.items() if name.startswith("moe_serve:")}
    alias = {name: value for name, value in found.items() if name.startswith("vllm:")}
    families = [family.name for family in text_string_to_metric_families(text)]
    copied = {name.removeprefix("vllm:") for name in families if name.startswith("vllm:")}
    assert copied == {row.name for row in METRICS if row.is_vllm}
    for name, value in alias.items():
        labels = name.partition("{")[2][:-1].split(",")
        assert "engine=0" in labels, name
        rest = ",".join(label for label in labels if label != "engine=0")
        assert own[f"moe_serve:{name.removeprefix('vllm:').partition('{')[0]}{{{rest}}}"] == value
    assert "vllm:" not in TestClient(make_app()).get("/metrics").text


def test_the_page_does_not_grow_with_odd_paths(make_app: Callable[..., FastAPI]) -> None:
    app = make_app(metrics_alias="vllm")
    client = TestClient(app)

    async def visit(start: int, count: int) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            """Drops the message."""

        for i in range(start, start + count):
            path = (f"/odd/{i}", f"/v1/models/{i}", f"/v1/chat/completions/{i}", f"/{i}%00")[i % 4]
            scope = {
                "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1",
                "method": ("GET", "POST", f"M{i}")[i % 3], "path": path, "raw_path": path.encode(),
                "query_string": b"", "root_path": "", "headers": [], "scheme": "http",
                "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
            }  # fmt: skip
            await app(scope, receive, send)

    def num_lines() -> int:
        return len(client.get("/metrics").text.splitlines())

    num_lines()
    asyncio.run(visit(0, 100))
    before = num_lines()
    asyncio.run(visit(100, 10_000 if EVERY_CASE else 1000))
    assert num_lines() == before
