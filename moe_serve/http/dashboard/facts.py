"""Facts that the dashboard gets once, when the server starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.cache.events.publisher import EventStats
from moe_serve.config.sections import EngineConfig, SpeculationConfig
from moe_serve.engine.build import BuiltEngine
from moe_serve.engine.engine_facts import EngineFacts
from moe_serve.engine.execute.step_timeline import StepTimeline
from moe_serve.engine.watch.expert_load import INTERVAL_S, ExpertLoad
from moe_serve.http.metrics.scrape import NO_CACHE_FACTS, CacheFacts

GRAPHED_INTERVAL_S = 2.0  # counted steps cannot be replayed as a CUDA graph, so few are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorFacts:
    """The predictor of experts per request, as configured."""

    kind: str
    floor: float  # minimum recall
    is_followed: bool  # False: the predictor is measured, but not used


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardFacts:
    """Facts about the server. None: the server does not have it, or does not report it."""

    layout: str = "one process"
    max_running: int | None = None
    max_waiting: int | None = None
    cache: CacheFacts = NO_CACHE_FACTS
    experts: ExpertLoad | None = None
    predictor: PredictorFacts | None = None
    last_step: Callable[[], StepTimeline | None] | None = None
    speculation: SpeculationConfig = SpeculationConfig()
    kv_events: Callable[[], EventStats | None] = lambda: None


NO_FACTS = DashboardFacts()


def dashboard_facts(built: BuiltEngine, config: EngineConfig) -> DashboardFacts:
    """Returns the facts of an engine. Its routing is counted from this call on."""
    return DashboardFacts(
        layout=layout_line(built.layout),
        max_running=config.scheduler.max_num_seqs * max(1, built.layout.attention_ranks),
        max_waiting=config.scheduler.max_queued_requests,
        cache=CacheFacts(
            has_prefix_cache=config.cache.prefix_cache,
            separates_keys=config.cache.separates_keys,
            page_size=built.layout.page_size,
            dtype=built.layout.dtype,
        ),
        experts=_counted(built),
        predictor=_predictor(config),
        last_step=built.last_step,
        speculation=config.speculation,
        kv_events=lambda: None if built.kv_events is None else built.kv_events.stats(),
    )


def layout_line(layout: EngineFacts) -> str:
    """Returns a short description: `one process`, or `2 attention ranks, 1 expert rank`."""
    if not layout.attention_ranks:
        return "one process"
    if layout.cells:
        return " ".join(layout.cells)
    pools = ((layout.attention_ranks, "attention"), (layout.expert_ranks, "expert"))
    line = ", ".join(f"{n} {pool} rank{'' if n == 1 else 's'}" for n, pool in pools)
    tp = layout.attention_tp
    return line if tp == 1 else f"{line}, {tp} shards for each attention rank"


def _counted(built: BuiltEngine) -> ExpertLoad | None:
    spec = built.spec
    if not spec.num_sparse_layers:
        return None
    is_graphed = built.layout.device.startswith("cuda") and not built.layout.attention_ranks
    load = ExpertLoad(
        [number for number, layer in enumerate(spec.layers) if layer.is_sparse],
        spec.router.num_experts,
        spec.router.top_k,
        interval_s=GRAPHED_INTERVAL_S if is_graphed else INTERVAL_S,
    )
    built.routes.add(load)
    return load


def _predictor(config: EngineConfig) -> PredictorFacts | None:
    wanted = config.predictor
    if wanted.path is None or wanted.mode == "off":
        return None
    kind = "request predictor that keeps learning" if wanted.learn else "request predictor"
    is_followed = wanted.mode == "act"
    return PredictorFacts(kind=kind, floor=wanted.min_recall, is_followed=is_followed)
