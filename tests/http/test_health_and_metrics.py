"""Health follows progress, and metrics have closed sets of labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.engine.request.stats import MicroBatchCount, Pool, PoolStats, PoolUse, StageUse
from moe_serve.http.admin.status import ProgressWatch
from moe_serve.http.metrics.metrics import route_label


def test_live_and_ready(client: TestClient, engine: Any) -> None:
    live = client.get("/health/live")
    assert live.json() == {"status": "live", "num_steps": 0, "num_running": 0, "num_waiting": 0}
    assert client.get("/health/ready").status_code == 200
    engine.is_alive = False
    for path in ("/health/live", "/health/ready"):
        response = client.get(path)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"


def test_not_ready_while_draining(make_app: Callable[..., FastAPI]) -> None:
    app = make_app()
    client = TestClient(app)
    app.state.generations.begin_drain()
    response = client.get("/health/ready")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "server_draining"
    assert int(response.headers["retry-after"]) >= 1
    assert client.get("/health/live").status_code == 200


def test_ranks_away_are_no_stall_but_not_ready(client: TestClient, engine: Any) -> None:
    engine.outage_s, engine.num_waiting, engine.last_turn_age_s = 0.2, 3, 0.1
    assert client.get("/health/ready").status_code == 200, "over in a moment"
    engine.outage_s = engine.last_turn_age_s = 75.0
    assert client.get("/health/live").status_code == 200
    response = client.get("/health/ready")
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["code"] == "ranks_away" and "missing for 75 s" in error["message"]


def test_busy_is_live_and_stalled_is_not(engine: Any) -> None:
    watch, stats = ProgressWatch(), engine.stats()
    busy = replace(stats, load=replace(stats.load, num_running=2))
    assert watch.stalled_for(replace(busy, num_steps=1), now=0.0) == 0.0
    assert watch.stalled_for(replace(busy, num_steps=1), now=50.0) == 50.0
    assert watch.stalled_for(replace(busy, num_steps=2), now=70.0) == 0.0
    assert watch.stalled_for(replace(busy, num_steps=2), now=170.0) == 100.0
    assert watch.stalled_for(replace(stats, num_steps=2), now=180.0) == 0.0


def test_the_engines_own_clock_decides(client: TestClient, engine: Any) -> None:
    """Polls that are far apart see the same step; only the engine knows when it last made
    progress."""
    engine.last_turn_age_s = 3600.0  # asleep: nothing to do
    assert client.get("/health/live").status_code == 200
    engine.num_waiting = 1
    response = client.get("/health/live")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_stalled"
    assert "3600 s with 0 sequences running and 1 waiting" in response.json()["error"]["message"]
    engine.last_turn_age_s = 59.0
    assert client.get("/health/live").status_code == 200
    load = replace(engine.stats().load, num_running=1)
    watch, stats = ProgressWatch(), replace(engine.stats(), load=load, last_turn_age_s=0.1)
    assert watch.stalled_for(stats, now=0.0) == 0.1
    assert watch.stalled_for(stats, now=1000.0) == 0.1


def test_metrics(client: TestClient, engine: Any) -> None:
    client.post("/v1/completions", json={"prompt": "hi", "n": 2})
    client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
    engine.max_requests = 0
    client.post("/v1/completions", json={"prompt": "hi"})
    text = client.get("/metrics").text
    label = 'model_name="tiny"'
    for line in (
        f"moe_serve:num_requests_running{{{label}}} 0.0",
        f"moe_serve:num_requests_waiting{{{label}}} 0.0",
        f"moe_serve:kv_cache_usage_perc{{{label}}} 0.0",
        f"moe_serve:prompt_tokens_total{{{label}}} 7.0",
        f"moe_serve:generation_tokens_total{{{label}}} 14.0",
        f"moe_serve:num_preemptions_total{{{label}}} 1.0",
        f"moe_serve:prefix_cache_pages{{{label}}} 4.0",
        f"moe_serve:prefix_cache_queries_total{{{label}}} 70.0",
        f"moe_serve:prefix_cache_hits_total{{{label}}} 30.0",
        f"moe_serve:prefix_cache_evictions_total{{{label}}} 2.0",
        f'moe_serve:request_success_total{{finished_reason="stop",{label}}} 2.0',
        f'moe_serve:request_success_total{{finished_reason="length",{label}}} 1.0',
        f"moe_serve:time_to_first_token_seconds_count{{{label}}} 3.0",
        f"moe_serve:e2e_request_latency_seconds_count{{{label}}} 3.0",
        f'moe_serve:admission_rejections_total{{{label},reason="queue_full"}} 1.0',
        f'moe_serve:http_requests_total{{{label},route="/v1/completions",status="200"}} 2.0',
        f'moe_serve:http_requests_total{{{label},route="/v1/completions",status="429"}} 1.0',
    ):
        assert line in text, line
    assert "moe_serve:inter_token_latency_seconds_bucket" in text
    assert "_created" not in text


def test_metrics_of_the_pools(client: TestClient, engine: Any) -> None:
    names = ("pool_", "micro_batches", "pipeline_", "exposed_communication")
    assert not any(f"moe_serve:{name}" in client.get("/metrics").text for name in names)
    engine.pools = PoolStats()  # no step was recorded yet
    assert not any(f"moe_serve:{name}" in client.get("/metrics").text for name in names)
    pools: tuple[Pool, ...] = ("attention", "expert")
    engine.pools = PoolStats(
        pools=tuple(
            PoolUse(pool=pool, num_ranks=n, bubble_ratio=n / 8, slowest_rank=1, slowest_excess=0.5)
            for n, pool in enumerate(pools, start=2)
        ),
        stages=(StageUse(stage="combine", seconds=0.25),),
        exposed_communication_ratio=0.125,
        micro_batches=3,
        steps=(
            MicroBatchCount(micro_batches=1, reason="one sequence", num_steps=5),
            MicroBatchCount(micro_batches=3, reason="predicted best", num_steps=7),
        ),
    )
    text, label = client.get("/metrics").text, 'model_name="tiny"'
    for line in (
        f'moe_serve:pool_ranks{{{label},pool="attention"}} 2.0',
        f'moe_serve:pool_bubble_ratio{{{label},pool="attention"}} 0.25',
        f'moe_serve:pool_bubble_ratio{{{label},pool="expert"}} 0.375',
        f'moe_serve:pool_slowest_rank{{{label},pool="expert"}} 1.0',
        f'moe_serve:pool_slowest_rank_excess_ratio{{{label},pool="expert"}} 0.5',
        f"moe_serve:exposed_communication_ratio{{{label}}} 0.125",
        f"moe_serve:micro_batches{{{label}}} 3.0",
        f'moe_serve:pipeline_stage_seconds{{{label},stage="combine"}} 0.25',
        f'moe_serve:pipeline_steps_total{{micro_batches="1",{label},reason="one sequence"}} 5.0',
        f'moe_serve:pipeline_steps_total{{micro_batches="3",{label},reason="predicted best"}} 7.0',
    ):
        assert line in text, line


def test_odd_requests_do_not_grow_the_page(client: TestClient) -> None:
    def visit(start: int) -> int:
        for i in range(start, start + 10):
            client.request(f"M{i}", f"/odd/{i}")
            client.get(f"/v1/models/m{i}")
            client.post("/v1/completions", json={"prompt": "x", "model": f"m{i}"})
        return len(client.get("/metrics").text.splitlines())

    visit(0)
    assert visit(10) == visit(20)
    assert route_label("/v1/models/anything") == "/v1/models/{id}"
    assert route_label("/anything") == "other"
