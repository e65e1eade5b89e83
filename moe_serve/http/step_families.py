"""The metrics of the engine's steps and of its cache's shape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from moe_serve.config import PAGE_SIZE
from moe_serve.engine.client import EngineStats
from moe_serve.engine.step_tokens import BOUNDS, StepTokens


def step_families(stats: EngineStats, prefix: str, model_name: str) -> Iterator[Metric]:
    histogram = HistogramMetricFamily(
        prefix + "iteration_tokens_total", "Tokens that a step computed.", labels=["model_name"]
    )
    buckets = _cumulative(stats.step_tokens)
    histogram.add_metric([model_name], buckets, float(stats.step_tokens.num_tokens))
    yield histogram
    # The names of the labels are vLLM's, as gateways that route by free pages read them.
    info = GaugeMetricFamily(
        prefix + "cache_config_info",
        "1; the labels say how many tokens a KV page has, and how many pages there are.",
        labels=["model_name", "block_size", "num_gpu_blocks"],
    )
    info.add_metric([model_name, str(PAGE_SIZE), str(stats.num_pages)], 1.0)
    yield info


def _cumulative(tokens: StepTokens) -> list[tuple[str, float]]:
    """[("1.0", 3.0), ("8.0", 5.0), ..., ("+Inf", 9.0)]: steps of at most so many tokens."""
    bounds = [*(str(float(bound)) for bound in BOUNDS), "+Inf"]
    sums = [float(sum(tokens.num_steps[: i + 1])) for i in range(len(bounds))]
    return list(zip(bounds, sums, strict=True))
