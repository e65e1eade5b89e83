"""Takes the snapshots that one scrape of /metrics reads, and defines a row of the metrics table.

A scrape holds snapshots of the engine, the server and the experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.placement import Placement
from moe_serve.adapters.registry import AdapterRegistry, AdapterStats
from moe_serve.cache.events.publisher import EventStats
from moe_serve.cache.histogram import Histogram
from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.request.draft_counts import DraftCounts, SourceCounts
from moe_serve.engine.request.stats import EngineStats
from moe_serve.engine.routes.cell_placements import AnyPlacement, CellPlacements
from moe_serve.engine.routes.placement_control import PlacementStatus
from moe_serve.engine.schedule.policy.rank_load import RankLoads
from moe_serve.engine.tracing import Tracing, TracingStatus
from moe_serve.engine.watch.expert_load import ExpertCounts, ExpertLoad
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.metrics.finished_sequence import FinishedSequence
from moe_serve.http.metrics.recent import TokenGaps


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """Properties of the KV cache that come from the configuration and the model."""

    has_prefix_cache: bool = True
    separates_keys: bool = False  # requests with different API keys share no pages
    page_size: int = 16  # tokens
    dtype: str = "auto"  # of its values


NO_CACHE_FACTS = CacheFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShares:
    """The load of the expert ranks. None: no row was counted."""

    shares: tuple[float, ...] | None  # of all rows, by rank
    balance: float | None  # mean over max load of the ranks, mean over layers
    num_replicas: int  # copies of experts beyond the first


class RankSharer:
    """Distributes the counted rows over expert ranks under the current placement. The rows of an
    expert are shared evenly among its copies.

    L layers, E experts, K ranks. Caches what it derived from a placement. Not thread-safe.
    """

    def __init__(self) -> None:
        self._placement: Placement | None = None
        self._loads: RankLoads | None = None
        self._num_replicas = 0

    def of(self, placement: Placement, rows_LE: NDArray[np.int64]) -> RankShares:
        loads = self._follow(placement)
        rows_LK = loads.of(rows_LE.ravel().astype(np.float32), 1)
        total, most_L = rows_LK.sum(), rows_LK.max(axis=1)
        if not total:
            return RankShares(shares=None, balance=None, num_replicas=self._num_replicas)
        is_used_L = most_L > 0
        balance = (rows_LK.mean(axis=1)[is_used_L] / most_L[is_used_L]).mean()
        shares = rows_LK.sum(axis=0) / total
        return RankShares(
            shares=tuple(shares.tolist()),
            balance=float(balance),
            num_replicas=self._num_replicas,
        )

    def _follow(self, placement: Placement) -> RankLoads:
        if self._loads is None:
            self._loads = RankLoads(placement)
        if placement is not self._placement:
            self._loads.use(placement)
            holders = [ranks for experts in placement.ranks_of.values() for ranks in experts]
            self._num_replicas = sum(max(0, len(ranks) - 1) for ranks in holders)
            self._placement = placement
        return self._loads


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertScrape:
    """The counted load of the experts."""

    layers: tuple[int, ...]
    window: ExpertCounts  # of the last minute
    total: ExpertCounts  # since the start
    shares: RankShares | None  # None: no expert ranks, or several cells
    has_each: bool  # a series for each expert of each layer


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterScrape:
    """The adapters. The names are those that an operator has loaded, never a client's text."""

    stats: AdapterStats
    max_names: int
    running: Sequence[str]  # names with answers that have begun
    waiting: Sequence[str]  # names with requests that have no token yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """The state of a server at one scrape. None: the server does not have this part."""

    stats: EngineStats
    cache: CacheFacts
    tracing: TracingStatus | None
    placement: PlacementStatus | None
    token_gaps: TokenGaps
    startup: Startup
    is_ready: bool
    experts: ExpertScrape | None
    drafts: DraftCounts | None = None  # has an entry for every source
    adapters: AdapterScrape | None = None
    kv_events: EventStats | None = None

    @property
    def oldest_waiting_s(self) -> float:
        return oldest_waiting_s(self.stats)


def oldest_waiting_s(stats: EngineStats) -> float:
    """Returns the seconds that the oldest sequence has waited; 0 if none waits."""
    arrival = stats.load.oldest_arrival
    return 0.0 if arrival is None else max(0.0, time.monotonic() - arrival)


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """The adapters of a server. `names` returns those of open requests that have begun to answer,
    or that have not."""

    registry: AdapterRegistry
    names: Callable[[bool], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeSources:
    """The parts of a server that a scrape reads. None: the server does not have the part."""

    engine: EngineClient
    startup: Startup
    is_draining: Callable[[], bool]  # True: the server is shutting down
    cache: CacheFacts = NO_CACHE_FACTS
    tracing: Tracing | None = None
    placement: AnyPlacement | None = None
    experts: ExpertLoad | None = None
    has_each_expert: bool = False  # a series for each expert of each layer
    drafters: tuple[str, ...] = ()  # sources of drafts; empty: speculation is off
    adapters: AdapterSource | None = None
    kv_events: Callable[[], EventStats | None] = lambda: None


class Scraper:
    """Takes a `Scrape` of the sources."""

    def __init__(self, sources: ScrapeSources, token_gaps: TokenGaps) -> None:
        self._sources, self._token_gaps = sources, token_gaps
        self._sharer = RankSharer()

    def scrape(self) -> Scrape:
        sources = self._sources
        stats = sources.engine.stats()
        return Scrape(
            stats=stats,
            cache=sources.cache,
            tracing=None if sources.tracing is None else sources.tracing.status(),
            placement=None if sources.placement is None else sources.placement.status(),
            token_gaps=self._token_gaps,
            startup=sources.startup,
            is_ready=is_ready(stats, is_draining=sources.is_draining()),
            drafts=_drafts(stats, sources.drafters),
            experts=None if sources.experts is None else self._experts(sources.experts),
            adapters=_adapters(sources.adapters),
            kv_events=sources.kv_events(),
        )

    def _experts(self, load: ExpertLoad) -> ExpertScrape:
        window, placement = load.look(), self._sources.placement
        shares = None
        if not (placement is None or isinstance(placement, CellPlacements)):
            shares = self._sharer.of(placement.plan(), window.rows_LE)
        return ExpertScrape(
            layers=load.layers,
            window=window,
            total=load.total,
            shares=shares,
            has_each=self._sources.has_each_expert,
        )


def _adapters(source: AdapterSource | None) -> AdapterScrape | None:
    if source is None:
        return None
    return AdapterScrape(
        stats=source.registry.stats,
        max_names=source.registry.max_names,
        running=source.names(True),
        waiting=source.names(False),
    )


def _drafts(stats: EngineStats, drafters: tuple[str, ...]) -> DraftCounts | None:
    """Returns the counts of drafts. A source that has not drafted yet counts 0."""
    if not drafters:
        return None
    return DraftCounts(by_source={name: SourceCounts() for name in drafters}) + stats.counts.drafts


PREFIX = "moe_serve:"  # of every metric's name
MODEL_LABEL = "model_name"  # on every metric

Kind = Literal["gauge", "counter", "histogram"]
Samples = Mapping[tuple[str, ...], float | None]  # values of the labels -> value
Value = float | Samples | Histogram
Buckets = tuple[float, ...]
PartT = TypeVar("PartT")
Getter = Callable[[PartT], Value | None]


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric. Labels come from closed sets: never a rank or anything that a client sends.

    `get` returns None if the server does not have the metric. A sample of None is not known and is
    left out; the metric itself stays.
    """

    name: str  # without the prefix, and without the `_total` of a counter's samples
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()  # beside the model's
    get: Getter[Scrape] | None = None  # None: ServerMetrics observes the metric
    of_request: Callable[[FinishedSequence], float | None] | None = None  # value to observe
    buckets: Buckets = ()  # upper ends, of a histogram that is observed
    is_vllm: bool = False  # vLLM has the same metric under this name

    @property
    def is_observed(self) -> bool:
        return self.get is None

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names that its samples have on the page, without the prefix."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{end}" for end in ("bucket", "count", "sum"))
        return (f"{self.name}_total",) if self.kind == "counter" else (self.name,)


class ScrapePart(Generic[PartT]):
    """Makes the rows of one part of a scrape. A server without the part has none of its metrics."""

    def __init__(
        self, of: Callable[[Scrape], PartT | None], prefix: str = "", *, is_vllm: bool = False
    ) -> None:
        self._of, self._prefix, self._is_vllm = of, prefix, is_vllm

    def gauge(self, name: str, text: str, get: Getter[PartT], *labels: str) -> MetricRow:
        return self._row(name, "gauge", text, get, labels)

    def counter(self, name: str, text: str, get: Getter[PartT], *labels: str) -> MetricRow:
        return self._row(name, "counter", text, get, labels)

    def histogram(self, name: str, text: str, get: Callable[[PartT], Histogram]) -> MetricRow:
        return self._row(name, "histogram", text, get, ())

    def _row(
        self, name: str, kind: Kind, text: str, get: Getter[PartT], labels: tuple[str, ...]
    ) -> MetricRow:
        def read(scrape: Scrape) -> Value | None:
            part = self._of(scrape)
            return None if part is None else get(part)

        return MetricRow(self._prefix + name, kind, text, labels, read, is_vllm=self._is_vllm)


OUTAGE_S = 1.0  # of missing ranks; shorter outages are not reported to clients


def is_ready(stats: EngineStats, *, is_draining: bool) -> bool:
    """Returns True if the server is ready, as /health/ready reports."""
    return stats.is_alive and not is_draining and stats.outage_s <= OUTAGE_S
