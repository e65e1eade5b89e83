"""The rows of the metrics table about adapters."""

from __future__ import annotations

import time

from moe_serve.http.metrics.scrape import AdapterScrape, MetricRow, ScrapePart

_adapters = ScrapePart[AdapterScrape](lambda scrape: scrape.adapters, "adapter_")
_lora = ScrapePart[AdapterScrape](lambda scrape: scrape.adapters, is_vllm=True)
ADAPTER_ROWS: tuple[MetricRow, ...] = (
    _lora.gauge(
        "lora_requests_info",
        "Seconds since 1970. The labels give the largest number of adapters that can be loaded, "
        "and the adapters of open requests: those with a first token and those without.",
        lambda a: {(str(a.max_names), ",".join(a.running), ",".join(a.waiting)): time.time()},
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
    ),
    _adapters.counter(
        "loads",
        "Reads of adapters from their files, repeated reads included, by result.",
        lambda a: {
            ("loaded",): float(a.stats.num_loads),
            ("failed",): float(a.stats.num_failures),
        },
        "result",
    ),
    _adapters.counter(
        "load_seconds", "Time spent on reading adapters.", lambda a: a.stats.load_seconds
    ),
    _adapters.counter(
        "evictions",
        "Adapters whose weights were dropped to stay below adapters.memory_bytes.",
        lambda a: float(a.stats.num_evictions),
    ),
    _adapters.gauge(
        "names", "Adapters that requests can name.", lambda a: float(a.stats.num_names)
    ),
    _adapters.gauge(
        "in_memory", "Adapters whose weights are in memory.", lambda a: float(a.stats.num_in_memory)
    ),
    _adapters.gauge(
        "bytes", "Bytes of the weights of adapters.", lambda a: float(a.stats.bytes_in_memory)
    ),
    _adapters.gauge(
        "pinned_bytes",
        "Bytes of the weights of adapters that are never dropped (adapters.pinned).",
        lambda a: float(a.stats.pinned_bytes),
    ),
)
