"""GET /dashboard/state shows the parts that exist, null for the others, and never waits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from experts.memory.memory_stats import MemoryStats
from experts.placement.problem.placement import Placement
from moe_serve.cache.tiers.store import TierStats
from moe_serve.config.sections import ServerConfig, SpeculationConfig
from moe_serve.engine.execute.step_timeline import Span, StepTimeline, StepTrack
from moe_serve.engine.request.draft_counts import DraftCounts, SourceCounts
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.stats import (
    EngineLoad,
    EngineStats,
    PolicyStats,
    RankLoad,
    RankStatus,
)
from moe_serve.engine.routes.placement_control import (
    BalanceFigures,
    LastPlan,
    PlacementBrief,
    PlacementStatus,
)
from moe_serve.engine.routes.route_records import RouteRecord
from moe_serve.engine.watch.expert_load import ExpertLoad
from moe_serve.http.app import create_app
from moe_serve.http.dashboard import board
from moe_serve.http.dashboard.board import speculation_part
from moe_serve.http.dashboard.facts import DashboardFacts, PredictorFacts

KEYS = {
    *("server", "now", "requests", "tokens", "latency", "kv", "experts", "expert_memory"),
    *("ranks", "placement", "predictor", "speculation", "service", "step", "history", "events"),
    *("cells", "autoscale", "cell_placements", "adapters"),
}


def state(client: TestClient, **params: Any) -> dict[str, Any]:
    response = client.get("/dashboard/state", params=params)
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store"
    found: dict[str, Any] = response.json()
    return found


def counted_load() -> ExpertLoad:
    """Layers 1 and 2 of a model with 4 experts; expert 0 of layer 1 has three rows of four."""
    load = ExpertLoad([1, 2], 4, 1)
    request = GenerationRequest(request_id="r", prompt_token_ids=(1,) * 4, params=SamplingParams())
    load.wants(0, {7: Sequence(7, request)})
    load.take(
        [
            RouteRecord(
                request_id="r",
                sequence_id=7,
                start=0,
                num_prompt_tokens=4,
                token_ids_N=np.zeros(4, np.int32),
                expert_ids_NLK=np.array([[[0], [0]], [[0], [1]], [[0], [2]], [[3], [3]]], np.uint8),
                weights_NLK=None,
            )
        ]
    )
    return load


class Control:
    """A placement in which expert 0 lies on both ranks, and the others on ranks 0, 0 and 1."""

    def brief(self) -> PlacementBrief:
        last = LastPlan(outcome="gain", text="too little")
        return PlacementBrief(state="idle", version=3, age_s=12.0, last=last, num_plans={})

    def status(self) -> PlacementStatus:
        """Not used here: it serves the metrics of live balancing."""
        return PlacementStatus(
            mode="off", state="idle", version=3, age_s=12.0, num_counted_tokens=0,
            balance=BalanceFigures(), last=None, num_plans={}, num_copies=0, num_bytes=0,
            before_p99_s=None, during_p99_s=None,
        )  # fmt: skip

    def plan(self) -> Placement:
        holders = ((0, 1), (0,), (0,), (1,))
        return Placement(num_ranks=2, num_experts=4, ranks_of={1: holders, 2: holders})


STEP = StepTimeline(
    number=16,
    duration_ms=2.5,
    micro_batches=2,
    why="predicted best",
    tracks=(
        StepTrack(
            name="expert-0",
            spans=(Span(start_ms=0, end_ms=1.5, kind="experts", layer=1, micro_batch=0, rows=3),),
        ),
    ),
)


@pytest.fixture
def ranks_client(engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """A client of a server that has every part."""
    member = RankStatus(
        name="expert-0", pool="expert", phase="serving", num_restarts=2, busy_ratio=0.5
    )
    plain = engine.stats

    def stats() -> EngineStats:
        return replace(
            plain(),
            load=replace(plain().load, oldest_arrival=time.monotonic() - 3.0),
            members=(
                replace(member, name="attention-0", pool="attention", num_restarts=0),
                member,
                replace(member, name="expert-1", phase="loading", busy_ratio=None),
            ),
            ranks=(
                RankLoad(
                    name="attention-0",
                    load=EngineLoad(num_running=2, num_pages=9, num_free_pages=1),
                ),
            ),
            num_lost_ranks=5,
            expert_memory=MemoryStats(resident_bytes=10, budget_bytes=20, num_needed=4, num_hits=3),
            batching=PolicyStats(policy="expert-aware", recall=0.6, is_predictor_on=True),
        )

    monkeypatch.setattr(engine, "stats", stats)
    facts = DashboardFacts(
        layout="1 attention rank, 2 expert ranks",
        max_running=64,
        max_waiting=256,
        experts=counted_load(),
        predictor=PredictorFacts(kind="request predictor", floor=0.2, is_followed=True),
        last_step=lambda: STEP,
    )
    control: Any = Control()
    config = ServerConfig(expert_metrics=True)
    return TestClient(create_app(engine, model, config, None, control, facts))


def test_a_server_that_has_little_says_null(client: TestClient) -> None:
    found = state(client)
    assert found.keys() == KEYS
    for part in ("experts", "expert_memory", "placement", "predictor", "step", "adapters"):
        assert found[part] is None
    assert found["ranks"] == []
    assert found["server"]["layout"] == "one process" and found["server"]["is_ready"]
    assert found["latency"] == {"window_s": 60, "ttft_ms": None, "tpot_ms": None}
    assert found["kv"] == {
        "page_tokens": 16,
        "tiers": [{"name": "memory", "pages": 10, "used": 0, "cached": 4}],
        "store": None,
        "prompt_tokens": {"prefix_cache": 30, "store": 0, "computed": 40},
        "prefix_hit_rate": 30 / 70,
        "window": None,
    }
    (started,) = found["events"]
    assert (started["seq"], started["kind"]) == (1, "started")


def test_a_disk_of_ranks_has_memory_in_front(client: TestClient, engine: Any) -> None:
    memory = TierStats(name="memory", where="shared memory", num_pages=3, num_bytes=30)
    engine.tier = TierStats(name="disk", where="kv", num_pages=7, memory=memory)
    store = state(client)["kv"]["store"]
    assert (store["name"], store["pages"]) == ("disk", 7)
    inner = store["memory"]
    assert (inner["name"], inner["bytes"], inner["memory"]) == ("memory", 30, None)


def test_requests_and_their_times_are_counted(client: TestClient, engine: Any) -> None:
    for prompt in ("a", "b"):
        client.post("/v1/completions", json={"prompt": prompt})
    engine.error_after = 2
    assert client.post("/v1/completions", json={"prompt": "c"}).status_code == 500
    engine.max_requests = 0
    assert client.post("/v1/completions", json={"prompt": "d"}).status_code == 429
    time.sleep(board._FRESH_S)
    found = state(client)
    requests = found["requests"]
    totals = [requests[f"{what}_total"] for what in ("finished", "failed", "rejected")]
    assert totals == [2, 1, 1]
    assert found["latency"]["ttft_ms"]["count"] == 3
    assert found["latency"]["tpot_ms"]["count"] == 2 * 5 + 1
    assert 0 < found["latency"]["ttft_ms"]["p50"] <= found["latency"]["ttft_ms"]["p99"]


def test_experts_ranks_and_placement(ranks_client: TestClient) -> None:
    found = state(ranks_client)
    experts = found["experts"]
    assert experts["load"] == [[3, 0, 0, 1], [1, 1, 1, 1]]
    assert experts["activated_mean"] == [2.0, 4.0]
    assert (experts["layers"], experts["top_k"], experts["num_tokens"]) == ([1, 2], 1, 4)
    by_name = {rank["name"]: rank for rank in found["ranks"]}
    # Rows of expert 0 are halved: rank 0 has 1.5 + 2.5, rank 1 has 2.5 + 1.5 of eight.
    assert by_name["expert-0"] == {
        "name": "expert-0", "kind": "expert", "phase": "serving", "load": 0.5, "busy": 0.5,
        "restarts": 2,
    }  # fmt: skip
    assert by_name["expert-1"]["phase"] == "loading" and by_name["expert-1"]["busy"] is None
    assert by_name["attention-0"]["load"] == 1.0
    placement = found["placement"]
    assert (placement["version"], placement["num_replicas"]) == (3, 2)
    assert placement["balance"] == pytest.approx((2 / 2.5 + 2 / 2.5) / 2)
    assert placement["last_move"] == "gain: too little"
    assert 2.99 < found["requests"]["oldest_waiting_s"] < 60.0
    assert found["expert_memory"] == {"resident_bytes": 10, "budget_bytes": 20, "hit_rate": 0.75}
    assert found["predictor"] == {
        "kind": "request predictor", "recall": 0.6, "floor": 0.2, "is_acting": True,
    }  # fmt: skip
    (track,) = found["step"]["tracks"]
    assert (found["step"]["number"], track["spans"][0]["kind"]) == (16, "experts")


def test_the_key_is_asked_for_and_since_is_checked(make_app: Any, client: TestClient) -> None:
    closed = TestClient(make_app(api_keys=("secret",)))
    assert closed.get("/dashboard/state").status_code == 401
    answer = closed.get("/dashboard/state", headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 200
    for wrong in ("-1", "x", "", "9" * 19, "١"):
        answer = client.get("/dashboard/state", params={"since": wrong})
        assert answer.status_code == 400, wrong
        assert answer.json()["error"]["param"] == "since"
    assert state(client, since=1)["events"] == []
    assert len(state(client, since=10**17)["events"]) == 1, "the number of an earlier server"


def test_an_engine_that_is_gone_is_told_of(client: TestClient, engine: Any) -> None:
    engine.is_alive = False
    assert not state(client)["server"]["is_ready"]


def test_the_application_samples_while_it_runs(
    make_app: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "INTERVAL_S", 0.02)
    monkeypatch.setattr(board, "_FRESH_S", 0.0)
    with TestClient(make_app()) as running:
        deadline = time.monotonic() + 60
        while len(state(running)["history"]["t"]) < 3:
            assert time.monotonic() < deadline, "no samples came"
        history = state(running)["history"]
        lengths = {name: len(column) for name, column in history.items() if name != "interval_s"}
        assert len(set(lengths.values())) == 1, lengths
        app: Any = running.app
        app.state.generations.begin_drain()
        while (events := state(running)["events"])[-1]["kind"] != "draining":
            assert time.monotonic() < deadline, events
        assert not state(running)["server"]["is_ready"]


def metrics_of(client: TestClient) -> Mapping[str, float]:
    lines = client.get("/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.removeprefix("moe_serve:"): float(value) for name, value in pairs}


def test_metrics_of_the_experts_at_work(ranks_client: TestClient) -> None:
    found = metrics_of(ranks_client)
    name = 'model_name="tiny"'
    assert found[f'activated_experts{{layer="1",{name}}}'] == 2.0
    assert found[f'expert_load_max_over_mean{{layer="1",{name}}}'] == 3.0
    assert found[f'expert_load_max_over_mean{{layer="2",{name}}}'] == 1.0
    assert found[f"expert_rank_balancedness{{{name}}}"] == pytest.approx(0.8)
    assert found[f"placement_replicas{{{name}}}"] == 2
    assert found[f"expert_counted_tokens_total{{{name}}}"] == 4
    assert found[f'expert_tokens_total{{expert="0",layer="1",{name}}}'] == 3
    assert found[f"ready{{{name}}}"] == 1
    assert 2.99 < found[f"oldest_waiting_seconds{{{name}}}"] < 60.0
    assert found[f"rank_losses_total{{{name}}}"] == 5
    assert found[f'ranks{{{name},phase="loading",pool="expert"}}'] == 1
    assert found[f'ranks{{{name},phase="serving",pool="attention"}}'] == 1


def test_a_series_for_each_expert_only_if_asked_for(engine: Any, model: Any) -> None:
    facts = DashboardFacts(experts=counted_load())
    closed = TestClient(create_app(engine, model, ServerConfig(), facts=facts))
    names = {name.partition("{")[0] for name in metrics_of(closed)}
    assert "expert_counted_tokens_total" in names and "ready" in names
    assert not names & {"expert_tokens_total", "ranks", "rank_losses_total", "placement_replicas"}


def test_drafts(engine: Any, model: Any) -> None:
    facts = DashboardFacts(speculation=SpeculationConfig(method="suffix", max_tokens=4))
    client = TestClient(create_app(engine, model, ServerConfig(), facts=facts))
    found = state(client)["speculation"]
    assert found["drafters"] == "suffix: ngram, suffix, prediction; at most 4 tokens"
    assert found["acceptance"] is None and found["tokens_per_step"] is None
    engine.num_steps = 30  # generated tokens
    counts = SourceCounts(num_drafts=5, num_drafted=16, num_accepted=12)
    engine.drafts = DraftCounts(by_source={"ngram": counts})
    found = speculation_part(engine.stats(), facts.speculation)
    assert found is not None
    assert found["acceptance"] == 0.75 and found["tokens_per_step"] == 1.667  # 30 tokens, 18 steps
    assert found["accepted_by_source"] == {"ngram": 12}
