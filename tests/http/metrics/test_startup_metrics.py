"""How the server started, as metrics: each phase that has ended, and what memory was planned."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from moe_serve.engine.memory.memory_plan import MemoryPlan, ProcessMemory
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.metrics.family_maker import FamilyMaker
from moe_serve.http.metrics.server_families import startup_families


class _Families:
    def __init__(self, startup: Startup) -> None:
        self._startup = startup

    def collect(self) -> object:
        return startup_families(self._startup, FamilyMaker("m"))


def found(startup: Startup) -> dict[str, float]:
    """{name{what it is of}: value}"""
    registry = CollectorRegistry()
    registry.register(_Families(startup))  # type: ignore[arg-type]
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            (of,) = labels.values()
            samples[f"{sample.name.removeprefix('moe_serve:')}{{{of}}}"] = sample.value
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
