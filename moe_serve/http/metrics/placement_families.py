"""Metrics of live rebalancing. Labels are closed sets: never a rank, a layer or an expert."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moe_serve.engine.routes.placement_control import PlacementStatus


def placement_families(status: PlacementStatus, prefix: str, model_name: str) -> Iterator[Metric]:
    """What of `status` is known, as metric families."""
    gauges: dict[str, tuple[str, float]] = {
        "version": ("Lower bound of the number of placement switches.", status.version),
        "age_seconds": ("Time since the last switch, or since the start.", status.age_s),
        "moving": ("Whether experts are being copied.", float(status.state == "copying")),
    }
    counters = {
        "copied_bytes": ("Bytes of experts that ranks read for moves.", status.num_bytes),
        "copies": ("Copies of experts that were moved.", status.num_copies),
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"{prefix}placement_{name}", text, labels=["model_name"])
        gauge.add_metric([model_name], value)
        yield gauge
    for name, (text, count) in counters.items():
        counter = CounterMetricFamily(f"{prefix}placement_{name}", text, labels=["model_name"])
        counter.add_metric([model_name], count)
        yield counter
    plans = CounterMetricFamily(
        f"{prefix}placement_plans", "Plans by outcome.", labels=["model_name", "outcome"]
    )
    for outcome, num_plans in status.num_plans.items():
        plans.add_metric([model_name, outcome], num_plans)
    yield plans
    balance = status.balance
    yield _labelled(
        f"{prefix}placement_balancedness",
        "Mean over max load of the expert ranks, mean over layers.",
        model_name,
        "kind",
        {"before": balance.before, "predicted": balance.predicted, "achieved": balance.achieved},
    )
    yield _labelled(
        f"{prefix}placement_step_p99_seconds",
        "The 99th percentile of step times around the last move.",
        model_name,
        "when",
        {"before": status.before_p99_s, "during": status.during_p99_s},
    )


def _labelled(
    name: str, text: str, model_name: str, label: str, values: dict[str, float | None]
) -> Metric:
    """A gauge with one label, without samples for unknown values."""
    gauge = GaugeMetricFamily(name, text, labels=["model_name", label])
    for key, value in values.items():
        if value is not None:
            gauge.add_metric([model_name, key], value)
    return gauge
