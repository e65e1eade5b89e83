"""Metrics of the pools. Labels: pool, number of micro-batches, reason; never a rank."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moe_serve.engine.request.pool_stats import PoolStats


def pool_families(stats: PoolStats, prefix: str, model_name: str) -> Iterator[Metric]:
    """What of `stats` is known, as metric families."""
    by_pool = {
        "pool_ranks": ("Ranks that took part in the last recorded steps.", "num_ranks"),
        "pool_bubble_ratio": ("Share of a pool's time without work, 0 to 1.", "bubble_ratio"),
        "pool_slowest_rank": ("The rank of a pool with the most busy time.", "slowest_rank"),
        "pool_slowest_rank_excess_ratio": (
            "Busy time of that rank over the mean of the pool's other ranks, less 1.",
            "slowest_excess",
        ),
    }
    for name, (text, field) in by_pool.items() if stats.pools else ():
        gauge = GaugeMetricFamily(prefix + name, text, labels=["model_name", "pool"])
        for use in stats.pools:
            gauge.add_metric([model_name, use.pool], getattr(use, field))
        yield gauge
    if stats.stages:
        yield _stages(stats, prefix, model_name)
    single = {
        "exposed_communication_ratio": (
            "Share of a step in which attention ranks wait for the experts' sums.",
            stats.exposed_communication_ratio,
        ),
        "micro_batches": ("Micro-batches of the last step.", stats.micro_batches),
    }
    for name, (text, value) in single.items():
        if value is not None:
            gauge = GaugeMetricFamily(prefix + name, text, labels=["model_name"])
            gauge.add_metric([model_name], value)
            yield gauge
    if stats.steps:
        yield _steps(stats, prefix, model_name)


def _stages(stats: PoolStats, prefix: str, model_name: str) -> Metric:
    gauge = GaugeMetricFamily(
        prefix + "pipeline_stage_seconds",
        "Time that a rank spent in a stage, such as dispatch or combine, in one of the last "
        "recorded steps.",
        labels=["model_name", "stage"],
    )
    for use in stats.stages:
        gauge.add_metric([model_name, use.stage], use.seconds)
    return gauge


def _steps(stats: PoolStats, prefix: str, model_name: str) -> Metric:
    counter = CounterMetricFamily(
        prefix + "pipeline_steps",
        "Steps by their number of micro-batches and the reason for that number.",
        labels=["model_name", "micro_batches", "reason"],
    )
    for count in stats.steps:
        labels = [model_name, str(count.micro_batches), count.reason]
        counter.add_metric(labels, count.num_steps)
    return counter
