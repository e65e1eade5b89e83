"""Metrics of the server's start, with the same values as `GET /startup`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from moe_serve.engine.memory.memory_plan import MemoryPlan
from moe_serve.engine.watch.startup import Startup


def startup_families(startup: Startup, prefix: str, model_name: str) -> Iterator[Metric]:
    seconds = GaugeMetricFamily(
        prefix + "startup_seconds",
        "Duration of a phase of the start.",
        labels=["model_name", "phase"],
    )
    for phase in startup.phases:
        if phase.name != "ready":
            seconds.add_metric([model_name, phase.name], phase.seconds)
    yield seconds
    if startup.plan is not None:
        yield _planned(startup.plan, prefix, model_name)


def _planned(plan: MemoryPlan, prefix: str, model_name: str) -> Metric:
    gauge = GaugeMetricFamily(
        prefix + "planned_memory_bytes",
        "Memory that the plan before the start assigns to a purpose, summed over all processes.",
        labels=["model_name", "purpose"],
    )
    purposes = {
        "weights": sum(process.weights for process in plan.processes),
        "kv_pages": sum(process.kv_bytes for process in plan.processes),
        "dispatch_buffers": sum(process.buffers for process in plan.processes),
    }
    for purpose, num_bytes in purposes.items():
        gauge.add_metric([model_name, purpose], num_bytes)
    return gauge
