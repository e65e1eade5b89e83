"""Metric families of the server: its start, its ranks, live rebalancing and recorded routing.

Each function yields the families of one part. Labels come from closed sets: never a rank, a layer
or an expert. A value of None is not known and gets no sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import Metric

from moe_serve.engine.memory.memory_plan import MemoryPlan
from moe_serve.engine.request.client import EngineStats
from moe_serve.engine.request.pool_stats import Pool
from moe_serve.engine.request.rank_status import RankPhase
from moe_serve.engine.routes.placement_control import PlacementStatus
from moe_serve.engine.tracing import TracingStatus
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.metrics.family_maker import FamilyMaker, Samples


def trace_families(status: TracingStatus, make: FamilyMaker) -> Iterator[Metric]:
    """The recorded routing."""
    total, is_recording = status.total, float(status.is_recording)
    yield from make.gauges(
        {"trace_recording": ("Whether the routing is recorded now.", is_recording)}
    )
    yield from make.counters(
        {
            "trace_tokens": ("Tokens whose routing was recorded.", total.num_tokens),
            "trace_bytes": ("Bytes of recordings that were written.", total.num_written_bytes),
            "trace_dropped_parts": (
                "Files of recordings that were deleted to stay below trace.max_bytes.",
                total.num_dropped_parts,
            ),
            "trace_lost_tokens": (
                "Recorded tokens that could not be written to disk.",
                total.num_lost_tokens,
            ),
        }
    )


def placement_families(status: PlacementStatus, make: FamilyMaker) -> Iterator[Metric]:
    """Live rebalancing of experts over ranks."""
    is_moving = float(status.state == "copying")
    gauges = {
        "version": ("Lower bound of the number of placement switches.", status.version),
        "age_seconds": ("Time since the last switch, or since the start.", status.age_s),
        "moving": ("Whether experts are being copied.", is_moving),
    }
    counters = {
        "copied_bytes": ("Bytes of experts that ranks read for moves.", status.num_bytes),
        "copies": ("Copies of experts that were moved.", status.num_copies),
    }
    yield from make.gauges(gauges, "placement_")
    yield from make.counters(counters, "placement_")
    plans: Samples = {(outcome,): count for outcome, count in status.num_plans.items()}
    yield make.counter("placement_plans", "Plans by outcome.", plans, "outcome")
    balance = status.balance
    yield make.gauge(
        "placement_balancedness",
        "Mean over max load of the expert ranks, mean over layers.",
        {
            ("before",): balance.before,
            ("predicted",): balance.predicted,
            ("achieved",): balance.achieved,
        },
        "kind",
    )
    yield make.gauge(
        "placement_step_p99_seconds",
        "The 99th percentile of step times around the last move.",
        {("before",): status.before_p99_s, ("during",): status.during_p99_s},
        "when",
    )


def startup_families(startup: Startup, make: FamilyMaker) -> Iterator[Metric]:
    """The server's start, with the same values as `GET /startup`."""
    seconds: Samples = {
        (each.name,): each.seconds for each in startup.phases if each.name != "ready"
    }
    yield make.gauge("startup_seconds", "Duration of a phase of the start.", seconds, "phase")
    if startup.plan is not None:
        yield make.gauge(
            "planned_memory_bytes",
            "Memory that the plan before the start assigns to a purpose, summed over all "
            "processes.",
            _planned_bytes(startup.plan),
            "purpose",
        )


def _planned_bytes(plan: MemoryPlan) -> dict[tuple[str, ...], float]:
    return {
        ("weights",): sum(process.weights for process in plan.processes),
        ("kv_pages",): sum(process.kv_bytes for process in plan.processes),
        ("dispatch_buffers",): sum(process.buffers for process in plan.processes),
    }


def rank_families(stats: EngineStats, make: FamilyMaker) -> Iterator[Metric]:
    """The ranks of the cluster by phase, and how many were lost."""
    yield from make.counters(
        {"rank_losses": ("Times that a rank was declared lost.", stats.num_lost_ranks)}
    )
    counts = Counter((rank.pool, rank.phase) for rank in stats.members)
    ranks: Samples = {
        (pool, phase): counts[pool, phase]
        for pool in get_args(Pool)
        for phase in get_args(RankPhase)
    }
    yield make.gauge("ranks", "Ranks by phase.", ranks, "pool", "phase")
