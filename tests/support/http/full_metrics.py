"""The /metrics of a server with every part: ranks, expert memory, live balancing, recordings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np

from experts.memory.memory_stats import MemoryStats
from experts.placement.problem.placement import contiguous
from moe_serve.adapters.registry import AdapterStats
from moe_serve.cache.events.publisher import EventStats
from moe_serve.cache.tiers.store import TierStats
from moe_serve.config.sections import MetricsAlias
from moe_serve.engine.memory.memory_plan import MemoryPlan, ProcessMemory
from moe_serve.engine.request.moves_stats import MovesStats
from moe_serve.engine.request.request import FinishReason
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.service_stats import (
    ForecastError,
    ServiceStats,
    TenantCounts,
    TierCounts,
)
from moe_serve.engine.request.stats import (
    CellStatus,
    EngineCounts,
    EngineLoad,
    EngineStats,
    MicroBatchCount,
    PolicyStats,
    Pool,
    PoolStats,
    PoolUse,
    RankStatus,
    ScalingStats,
    StageUse,
)
from moe_serve.engine.routes.placement_control import OUTCOMES, BalanceFigures, PlacementStatus
from moe_serve.engine.routes.route_records import RouteRecord
from moe_serve.engine.tracing import TracingStatus
from moe_serve.engine.watch.expert_load import ExpertLoad
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.metrics.metrics import RejectionReason, ServerMetrics
from moe_serve.http.metrics.page import MetricsPage
from moe_serve.http.metrics.scrape import AdapterSource, ScrapeSources
from routing_predictor.traces.recording import RecordingStats


def metrics_text(
    stats: EngineStats,
    metrics: ServerMetrics | None = None,
    alias: MetricsAlias = "none",
    **parts: Any,
) -> str:
    """Returns the text of /metrics of a server with these parts (see `ScrapeSources`)."""
    engine: Any = SimpleNamespace(stats=lambda: stats)
    metrics = metrics or ServerMetrics("m")
    sources = ScrapeSources(
        engine=engine,
        is_draining=lambda: False,
        **{"startup": Startup(), **parts},
    )
    return MetricsPage(metrics, sources, alias).render().decode()


def full_stats() -> EngineStats:
    """Returns statistics of an engine with ranks, an expert memory and a batch policy with a
    predictor."""
    pools: tuple[Pool, ...] = ("attention", "expert")
    return EngineStats(
        num_steps=1,
        load=EngineLoad(num_running=1, num_waiting=1, num_pages=4, num_free_pages=2),
        counts=EngineCounts(num_preemptions=1, num_prompt_tokens=1, num_generated_tokens=1),
        tier=TierStats(name="disk", where="kv"),
        service=ServiceStats(
            order="atc",
            tiers=(TierCounts(tier="interactive", num_with_ttft=1),),
            output_limits=(40.0,),
            tenants=(TenantCounts(tier="interactive", tenant="acme", service_s=1.0),),
            forecast=ForecastError(num_compared=1),
        ),
        expert_memory=MemoryStats(),
        batching=PolicyStats(
            policy="expert-aware",
            activated_experts=1.0,
            recall=0.5,
            is_predictor_on=True,
            num_learnt=1,
        ),
        pools=PoolStats(
            pools=tuple(
                PoolUse(
                    pool=pool, num_ranks=2, bubble_ratio=0.1, slowest_rank=0, slowest_excess=0.1
                )
                for pool in pools
            ),
            stages=(StageUse(stage="dispatch", seconds=0.1),),
            exposed_communication_ratio=0.1,
            micro_batches=2,
            steps=(MicroBatchCount(micro_batches=2, reason="fixed", num_steps=1),),
        ),
        moves=MovesStats(ended={("hand_over", "done"): 1}),
        cells=(
            CellStatus(
                name="cell-0",
                role="prefill",
                ranks="1A1E",
                load=EngineLoad(num_pages=4, num_free_pages=2),
                num_steps=1,
                num_lost_ranks=0,
                outage_s=0.0,
            ),
        ),
        scaling=ScalingStats(policy="target", wanted={"both": 2}, num_decisions={"add": 1}),
        members=(
            RankStatus(
                name="expert-0", pool="expert", phase="serving", num_restarts=0, busy_ratio=0.5
            ),
        ),
    )


def full_metrics(alias: MetricsAlias = "none") -> str:
    """Returns the text of such a server's /metrics after one request of each outcome."""
    stats, plan = full_stats(), contiguous((0,), 4, 2)
    status = PlacementStatus(
        mode="auto",
        state="idle",
        version=1,
        age_s=1.0,
        num_counted_tokens=1,
        last=None,
        balance=BalanceFigures(before=0.5, predicted=0.9, achieved=0.8),
        num_plans=dict.fromkeys(OUTCOMES, 1),
        num_copies=1,
        num_bytes=1,
        before_p99_s=0.1,
        during_p99_s=0.1,
    )
    recorded = TracingStatus(
        is_recording=False,
        folder=None,
        sample_rate=0.0,
        has_weights=False,
        has_tokens=False,
        recording=RecordingStats(),
        total=RecordingStats(),
    )
    tracing: Any = SimpleNamespace(status=lambda: recorded)
    placement: Any = SimpleNamespace(status=lambda: status, plan=lambda: plan)
    registry: Any = SimpleNamespace(stats=AdapterStats(num_loads=1, num_names=1), max_names=8)
    metrics = ServerMetrics("m", tool_parser="hermes")
    for finished in FinishReason:
        metrics.observe_end(1.0, finished)
    for reasons in get_args(RejectionReason):
        for rejected in get_args(reasons):
            metrics.count_rejection(rejected)
    metrics.count_http_request("/metrics", 500, 0.1)
    return metrics_text(
        stats,
        metrics,
        alias,
        startup=_planned_start(),
        tracing=tracing,
        placement=placement,
        experts=_counted_load(),
        has_each_expert=True,
        drafters=("ngram", "grammar"),
        kv_events=lambda: EventStats(num_batches=1, num_stored=1),
        adapters=AdapterSource(registry=registry, names=lambda has_begun: ["sql"]),
    )


def _planned_start() -> Startup:
    """Returns the start of one process, with every phase begun."""
    startup = Startup()
    process = ProcessMemory(name="server", device="cpu", weights=2, kv_bytes=1, buffers=1)
    startup.plan = MemoryPlan(processes=(process,), rooms=())
    for phase in ("loading", "preparing", "ready"):
        startup.begin(phase)
    return startup


def _counted_load() -> ExpertLoad:
    """Returns the load of one layer of four experts, and a step of one token that chose two."""
    load, sequences = ExpertLoad((0,), 4, 2), {7: cast(Sequence, None)}
    load.wants(0, sequences)
    record = RouteRecord(
        request_id="r",
        start=0,
        num_prompt_tokens=1,
        token_ids_N=np.zeros(1, dtype=np.int32),
        expert_ids_NLK=np.array([[[1, 3]]], dtype=np.int16),
        sequence_id=7,
    )
    load.take([record])
    return load
