"""Collectors that read snapshots of the engine, the server and the experts at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.engine.tracing import Tracing
from moe_serve.engine.watch.expert_load import ExpertCounts, ExpertLoad
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.gate.readiness import is_ready
from moe_serve.http.metrics.engine_families import (
    CacheFacts,
    batching_families,
    cache_families,
    engine_families,
    memory_families,
    oldest_waiting_s,
    pool_families,
)
from moe_serve.http.metrics.family_maker import FamilyMaker, Samples
from moe_serve.http.metrics.rank_shares import RankSharer
from moe_serve.http.metrics.server_families import (
    placement_families,
    rank_families,
    startup_families,
    trace_families,
)


class EngineCollector(Collector):
    """Metrics of the engine, and of the recorded routing and live rebalancing if they exist."""

    def __init__(
        self,
        engine: EngineClient,
        model_name: str,
        tracing: Tracing | None,
        placement: PlacementControl | None,
        cache: CacheFacts,
    ) -> None:
        self._engine, self._tracing, self._placement = engine, tracing, placement
        self._cache, self._make = cache, FamilyMaker(model_name)

    def collect(self) -> Iterator[Metric]:
        stats, make = self._engine.stats(), self._make
        yield from engine_families(stats, make)
        yield from cache_families(stats, self._cache, make)
        if stats.expert_memory is not None:
            yield from memory_families(stats.expert_memory, make)
        if stats.batching is not None:
            yield from batching_families(stats.batching, make)
        if stats.pools is not None:
            yield from pool_families(stats.pools, make)
        if self._tracing is not None:
            yield from trace_families(self._tracing.status(), make)
        if self._placement is not None:
            yield from placement_families(self._placement.status(), make)


class ServerCollector(Collector):
    """Metrics of the server as a whole: start, readiness, waiting time, ranks by phase.

    `is_draining` tells whether the server is shutting down.
    """

    def __init__(
        self,
        engine: EngineClient,
        is_draining: Callable[[], bool],
        model_name: str,
        startup: Startup,
    ) -> None:
        self._engine, self._is_draining = engine, is_draining
        self._startup, self._make = startup, FamilyMaker(model_name)

    def collect(self) -> Iterator[Metric]:
        stats, make = self._engine.stats(), self._make
        yield from make.gauges(
            {
                "ready": (
                    "Whether the server accepts new requests, as /health/ready reports.",
                    float(is_ready(stats, is_draining=self._is_draining())),
                ),
                "oldest_waiting_seconds": (
                    "How long the oldest sequence in the queue has been waiting.",
                    oldest_waiting_s(stats),
                ),
            }
        )
        yield from startup_families(self._startup, make)
        if stats.members:
            yield from rank_families(stats, make)


class ExpertCollector(Collector):
    """Metrics of the experts' load. Yields nothing without `load`.

    Labels are the layers; `has_each` adds a series for each expert of each layer.
    """

    def __init__(
        self,
        load: ExpertLoad | None,
        placement: PlacementControl | None,
        model_name: str,
        *,
        has_each: bool = False,
    ) -> None:
        self._load, self._placement, self._has_each = load, placement, has_each
        self._sharer, self._make = RankSharer(), FamilyMaker(model_name)

    def collect(self) -> Iterator[Metric]:
        load = self._load
        if load is None:
            return
        window, total = load.look(), load.total
        yield from self._make.counters(
            {
                "expert_counted_tokens": (
                    "Tokens whose experts were counted.",
                    total.num_tokens,
                ),
                "expert_counted_steps": ("Steps whose experts were counted.", total.num_steps),
            }
        )
        yield from self._by_layer(load, window)
        if self._placement is not None:
            yield from self._by_rank(self._placement, window)
        if self._has_each:
            yield self._each(load, total)

    def _by_layer(self, load: ExpertLoad, window: ExpertCounts) -> Iterator[Metric]:
        """Metrics over the last minute; no samples if no step was counted."""
        mean_L = window.activated_mean
        activated: dict[tuple[str, ...], float] = {}
        hottest: dict[tuple[str, ...], float] = {}
        if mean_L is not None:
            ratios_L = window.rows_LE.max(axis=1) / np.maximum(1e-9, window.rows_LE.mean(axis=1))
            for layer, mean, ratio in zip(load.layers, mean_L, ratios_L, strict=True):
                activated[str(layer),] = float(mean)
                hottest[str(layer),] = float(ratio)
        text = "Different experts that a step activates, on average."
        yield self._make.gauge("activated_experts", text, activated, "layer")
        text = "Rows of the busiest expert over the mean."
        yield self._make.gauge("expert_load_max_over_mean", text, hottest, "layer")

    def _by_rank(self, placement: PlacementControl, window: ExpertCounts) -> Iterator[Metric]:
        shares = self._sharer.of(placement.plan(), window.rows_LE)
        yield self._make.gauge(
            "placement_replicas",
            "Copies of experts beyond the first.",
            {(): shares.num_replicas},
        )
        yield self._make.gauge(
            "expert_rank_balancedness",
            "Mean over max rows of the expert ranks in the last minute, mean over layers.",
            {(): shares.balance},
        )

    def _each(self, load: ExpertLoad, total: ExpertCounts) -> Metric:
        samples: Samples = {
            (str(layer), str(expert)): count
            for layer, rows_E in zip(load.layers, total.rows_LE.tolist(), strict=True)
            for expert, count in enumerate(rows_E)
        }
        text = "Counted tokens that chose an expert."
        return self._make.counter("expert_tokens", text, samples, "layer", "expert")
