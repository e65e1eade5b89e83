"""How the server started, as metrics: each phase that has ended, and what memory was planned."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from moe_serve.engine.memory.memory_plan import MemoryPlan, ProcessMemory
from moe_serve.engine.watch.startup import Startup
from tests.support.http.full_metrics import full_stats, metrics_text


def found(startup: Startup) -> dict[str, float]:
    """{name{what it is of}: value} of the rows that read the start."""
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
    }
    assert [phase.name for phase in phases] == ["checking", "loading", "preparing", "ready"]
    assert found(startup) == samples, "phases that have ended do not grow"


def test_without_a_plan() -> None:
    assert list(found(Startup())) == ["startup_seconds{checking}"]
