"""Copies metrics under vLLM's names, for dashboards and rules that were made for vLLM.

    moe_serve:num_requests_running{model_name="m"}  is also
    vllm:num_requests_running{model_name="m",engine="0"}

Only metrics with the same meaning are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

ALIAS_PREFIX = "vllm:"
ENGINE_LABEL = {"engine": "0"}  # clients see all attention ranks as one engine
SAME_AS_VLLM = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
        "cache_config_info",
        "prompt_tokens",
        "prompt_tokens_cached",
        "prompt_tokens_by_source",
        "generation_tokens",
        "num_preemptions",
        "corrupted_requests",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "request_success",
        "admission_rejections",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_time_per_output_token_seconds",
        "request_prompt_tokens",
        "request_prefill_kv_computed_tokens",
        "request_num_preemptions",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
        "iteration_tokens_total",
        "kv_block_lifetime_seconds",
        "kv_block_idle_before_evict_seconds",
        "kv_block_reuse_gap_seconds",
    }
)


def with_alias(metrics: Iterable[Metric], prefix: str) -> Iterator[Metric]:
    """Each metric, followed by its copy if it has one."""
    for metric in metrics:
        yield metric
        suffix = metric.name.removeprefix(prefix)
        if suffix in SAME_AS_VLLM:
            yield _copy(metric, prefix)


def _copy(metric: Metric, prefix: str) -> Metric:
    copy = Metric(
        ALIAS_PREFIX + metric.name.removeprefix(prefix), metric.documentation, metric.type
    )
    copy.samples = [
        sample._replace(
            name=ALIAS_PREFIX + sample.name.removeprefix(prefix),
            labels={**sample.labels, **ENGINE_LABEL},
        )
        for sample in metric.samples
    ]
    return copy
