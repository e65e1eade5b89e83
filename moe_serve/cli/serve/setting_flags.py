"""Maps the flags of `serve` and `launch` that are settings to keys of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# {parameter: key}
KEYS: Mapping[str, str] = {
    "attention_tp": "cluster.attention_tp",
    "placement": "cluster.placement",
    "timeline": "pipeline.timeline",
    "dtype": "model.dtype",
    "device": "model.device",
    "max_model_len": "model.max_model_len",
    "num_threads": "model.num_threads",
    "served_model_name": "server.served_model_name",
    "expert_memory": "model.expert_memory_bytes",
    "num_pages": "cache.num_pages",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_batched_tokens": "scheduler.max_batched_tokens",
    "max_queued_requests": "scheduler.max_queued_requests",
    "micro_batches": "pipeline.micro_batches",
    "batch_policy": "scheduler.batch_policy",
    "predictor": "predictor.path",
    "host": "server.host",
    "port": "server.port",
    "api_key": "server.api_keys",
    "metrics_alias": "server.metrics_alias",
    "otlp_traces_endpoint": "server.otlp_traces_endpoint",
    "ssl_certfile": "server.ssl_certfile",
    "ssl_keyfile": "server.ssl_keyfile",
    "log_format": "log.format",
}
# For `launch` these flags are handled with the nodes.
SERVE_KEYS: Mapping[str, str] = {
    "model": "model.path",
    "attention_ranks": "cluster.attention_ranks",
    "expert_ranks": "cluster.expert_ranks",
    **KEYS,
}
_NUMBERS_OR_WORDS = ("expert_memory", "micro_batches")


def given_flags(parameters: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the flags of `names` that the command line gave: {parameter: value}."""
    given = {name: parameters[name] for name in names}
    given = {name: value for name, value in given.items() if value not in (None, [], ())}
    for name in _NUMBERS_OR_WORDS:  # keys that take a number or a word, such as auto
        if isinstance(value := given.get(name), str) and value.isdecimal():
            given[name] = int(value)
    return given
