"""Metrics of the experts' load. Labels are the layers and, if configured, the experts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.engine.watch.expert_load import ExpertCounts, ExpertLoad
from moe_serve.http.metrics.metrics import PREFIX
from moe_serve.http.metrics.rank_shares import RankSharer


class ExpertCollector(Collector):
    """Yields nothing without `load`. `has_each` adds a series for each expert of each layer."""

    def __init__(
        self,
        load: ExpertLoad | None,
        placement: PlacementControl | None,
        model_name: str,
        *,
        has_each: bool = False,
    ) -> None:
        self._load, self._placement, self._model_name = load, placement, model_name
        self._has_each, self._sharer = has_each, RankSharer()

    def collect(self) -> Iterator[Metric]:
        load = self._load
        if load is None:
            return
        window, total = load.look(), load.total
        yield self._counter(
            "expert_counted_tokens", "Tokens whose experts were counted.", total.num_tokens
        )
        yield self._counter(
            "expert_counted_steps", "Steps whose experts were counted.", total.num_steps
        )
        yield from self._by_layer(load, window)
        if self._placement is not None:
            yield from self._by_rank(self._placement, window)
        if self._has_each:
            yield self._each(load, total)

    def _by_layer(self, load: ExpertLoad, window: ExpertCounts) -> Iterator[Metric]:
        """Metrics over the last minute; no samples if no step was counted."""
        activated = self._gauge(
            "activated_experts", "Different experts that a step activates, on average.", "layer"
        )
        hottest = self._gauge(
            "expert_load_max_over_mean", "Rows of the busiest expert over the mean.", "layer"
        )
        mean_L = window.activated_mean
        if mean_L is not None:
            ratios_L = window.rows_LE.max(axis=1) / np.maximum(1e-9, window.rows_LE.mean(axis=1))
            for layer, mean, ratio in zip(load.layers, mean_L, ratios_L, strict=True):
                activated.add_metric([self._model_name, str(layer)], float(mean))
                hottest.add_metric([self._model_name, str(layer)], float(ratio))
        yield activated
        yield hottest

    def _by_rank(self, placement: PlacementControl, window: ExpertCounts) -> Iterator[Metric]:
        shares = self._sharer.of(placement.plan(), window.rows_LE)
        replicas = self._gauge("placement_replicas", "Copies of experts beyond the first.")
        replicas.add_metric([self._model_name], shares.num_replicas)
        yield replicas
        balance = self._gauge(
            "expert_rank_balancedness",
            "Mean over max rows of the expert ranks in the last minute, mean over layers.",
        )
        if shares.balance is not None:
            balance.add_metric([self._model_name], shares.balance)
        yield balance

    def _each(self, load: ExpertLoad, total: ExpertCounts) -> Metric:
        counter = CounterMetricFamily(
            PREFIX + "expert_tokens",
            "Counted tokens that chose an expert.",
            labels=["model_name", "layer", "expert"],
        )
        for layer, rows_E in zip(load.layers, total.rows_LE.tolist(), strict=True):
            for expert, count in enumerate(rows_E):
                counter.add_metric([self._model_name, str(layer), str(expert)], count)
        return counter

    def _gauge(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(PREFIX + name, text, labels=["model_name", *labels])

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        counter.add_metric([self._model_name], value)
        return counter
