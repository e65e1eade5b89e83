"""The batch policy's metrics: labels are the policy that decides, nothing of a request."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moe_serve.engine.request.policy_stats import PolicyStats


def batching_families(stats: PolicyStats, prefix: str, model_name: str) -> Iterator[Metric]:
    """The known values of `stats` as metric families."""
    policy = GaugeMetricFamily(
        prefix + "batch_policy",
        "1 for the policy in use; fifo while a predictor is off.",
        labels=["model_name", "policy"],
    )
    policy.add_metric([model_name, stats.policy], 1.0)
    yield policy
    passed = CounterMetricFamily(
        prefix + "requests_passed_over",
        "Times that a waiting request let a later one start first.",
        labels=["model_name"],
    )
    passed.add_metric([model_name], stats.num_passed_over)
    yield passed
    if stats.num_learnt is not None:
        learnt = CounterMetricFamily(
            prefix + "predictor_learnt",
            "Predictions that were compared with the experts that requests chose, to train the "
            "predictor.",
            labels=["model_name"],
        )
        learnt.add_metric([model_name], stats.num_learnt)
        yield learnt
    is_on = stats.is_predictor_on
    single = {
        "activated_experts_predicted": (
            "Experts that the last step was expected to activate, summed over micro-batches and "
            "layers.",
            stats.activated_experts,
        ),
        "predictor_recall": (
            "Share of the chosen experts that were predicted.",
            stats.recall,
        ),
        "predictor_on": (
            "Whether the predictor's recall is at its floor or above.",
            None if is_on is None else float(is_on),
        ),
    }
    for name, (text, value) in single.items():
        if value is not None:
            gauge = GaugeMetricFamily(prefix + name, text, labels=["model_name"])
            gauge.add_metric([model_name], value)
            yield gauge
