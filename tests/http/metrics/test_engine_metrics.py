"""The metrics of an expert memory and of the start."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from experts.memory.memory_stats import MemoryStats
from moe_serve.cluster.control.messages import StageSeconds, StepServed
from moe_serve.cluster.members.pool_watch import PoolWatch
from moe_serve.engine.memory.memory_plan import MemoryPlan, ProcessMemory
from moe_serve.engine.watch.startup import Startup
from tests.support.http.full_metrics import full_stats, metrics_text

STATS = MemoryStats(
    budget_bytes=300, resident_bytes=200, num_needed=8, num_hits=6, num_rows=10, wait_seconds=0.5
)


def test_page(client: TestClient, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "expert_memory" not in client.get("/metrics").text
    stats = dataclasses.replace(engine.stats(), expert_memory=STATS)
    monkeypatch.setattr(engine, "stats", lambda: stats)
    lines = client.get("/metrics").text.splitlines()
    for name, value in (
        ("hit_rate", 0.75),
        ("resident_bytes", 200.0),
        ("needed_total", 8.0),
        ("wait_seconds_total", 0.5),
    ):
        assert f'moe_serve:expert_memory_{name}{{model_name="tiny"}} {value}' in lines


def test_sums_and_differences() -> None:
    both = STATS + STATS
    assert (both.budget_bytes, both.num_needed, both.hit_rate) == (600, 16, 0.75)
    since = both - STATS
    assert (since.budget_bytes, since.num_needed, since.wait_seconds) == (600, 8, 0.5)
    assert MemoryStats().hit_rate == MemoryStats().row_hit_rate == 1.0


def test_counts_of_ranks_that_were_lost_or_started_again_stay() -> None:
    watch = PoolWatch(None, 1, None)
    assert watch.expert_memory is None

    def heard(name: str, num_visits: int) -> MemoryStats | None:
        memory = MemoryStats(budget_bytes=10, num_visits=num_visits, num_reads=2 * num_visits)
        served = StepServed(epoch=1, step=1, failure=None, seconds=StageSeconds(), memory=memory)
        watch.heard(name, served, 0)
        return watch.expert_memory

    heard("expert-0", 5)
    assert heard("expert-1", 7) == MemoryStats(budget_bytes=20, num_visits=12, num_reads=24)
    watch.keep_experts(["expert-0"])
    assert watch.expert_memory == MemoryStats(budget_bytes=10, num_visits=12, num_reads=24)
    assert heard("expert-0", 1) == MemoryStats(budget_bytes=10, num_visits=13, num_reads=26)


def found(startup: Startup) -> dict[str, float]:
    """Returns {name{labels}: value} of the rows that read the start."""
    samples = {}
    for family in text_string_to_metric_families(metrics_text(full_stats(), startup=startup)):
        name = family.name.removeprefix("moe_serve:")
        for sample in family.samples if name in ("startup_seconds", "planned_memory_bytes") else ():
            part = sample.labels.get("phase") or sample.labels["purpose"]
            samples[f"{name}{{{part}}}"] = sample.value
    return samples


def test_phases_and_planned_memory() -> None:
    startup = Startup()
    startup.plan = MemoryPlan(
        processes=(
            ProcessMemory(name="server", device="cpu", weights=5, kv_bytes=3, num_pages=1),
            ProcessMemory(name="expert-0", device="cpu", weights=7, buffers=2),
        ),
        rooms=(),
    )
    startup.begin("loading")
    startup.begin("preparing")
    startup.begin("ready")
    samples, phases = found(startup), startup.phases
    assert samples == {
        **{f"startup_seconds{{{phase.name}}}": phase.seconds for phase in phases[:3]},
        "planned_memory_bytes{weights}": 12.0,
        "planned_memory_bytes{kv_pages}": 3.0,
        "planned_memory_bytes{dispatch_buffers}": 2.0,
        "planned_memory_bytes{adapters}": 0.0,
    }
    assert [phase.name for phase in phases] == ["checking", "loading", "preparing", "ready"]
    assert found(startup) == samples, "phases that have ended do not grow"


def test_without_a_plan() -> None:
    assert list(found(Startup())) == ["startup_seconds{checking}"]
