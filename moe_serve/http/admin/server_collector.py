"""Metrics of the server as a whole: start, readiness, waiting time, ranks by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_serve.engine.request.client import EngineStats
from moe_serve.engine.request.pool_stats import Pool
from moe_serve.engine.request.rank_status import RankPhase
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.gate.readiness import is_ready
from moe_serve.http.generation.generation import GenerationService
from moe_serve.http.metrics.metrics import PREFIX
from moe_serve.http.metrics.startup_families import startup_families
from moe_serve.http.metrics.waiting import oldest_waiting_s


class ServerCollector(Collector):
    """Reads snapshots when Prometheus scrapes. Labels are closed sets: never a rank's name."""

    def __init__(self, generations: GenerationService, model_name: str, startup: Startup) -> None:
        self._generations, self._model_name, self._startup = generations, model_name, startup

    def collect(self) -> Iterator[Metric]:
        stats = self._generations.engine.stats()
        is_draining = self._generations.is_draining
        gauges: dict[str, tuple[str, float]] = {
            "ready": (
                "Whether the server accepts new requests, as /health/ready reports.",
                float(is_ready(stats, is_draining=is_draining)),
            ),
            "oldest_waiting_seconds": (
                "How long the oldest sequence in the queue has been waiting.",
                oldest_waiting_s(stats),
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        yield from startup_families(self._startup, PREFIX, self._model_name)
        if stats.members:
            yield from self._ranks(stats)

    def _ranks(self, stats: EngineStats) -> Iterator[Metric]:
        lost = CounterMetricFamily(
            PREFIX + "rank_losses", "Times that a rank was declared lost.", labels=["model_name"]
        )
        lost.add_metric([self._model_name], stats.num_lost_ranks)
        yield lost
        counts = Counter((rank.pool, rank.phase) for rank in stats.members)
        ranks = GaugeMetricFamily(
            PREFIX + "ranks", "Ranks by phase.", labels=["model_name", "pool", "phase"]
        )
        for pool in get_args(Pool):
            for phase in get_args(RankPhase):
                ranks.add_metric([self._model_name, pool, phase], counts[pool, phase])
        yield ranks
