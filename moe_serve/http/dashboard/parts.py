"""Builds the parts of the dashboard's state. None: the server does not have this part."""

from __future__ import annotations

from typing import Any

from moe_serve.engine.request.stats import EngineStats
from moe_serve.engine.routes.placement_control import PlacementBrief
from moe_serve.engine.watch.expert_load import WINDOW_S, ExpertCounts, ExpertLoad
from moe_serve.http.dashboard.facts import DashboardFacts, PredictorFacts
from moe_serve.http.metrics.recent import WINDOW_S as LATENCY_WINDOW_S
from moe_serve.http.metrics.recent import RecentRequests
from moe_serve.http.metrics.scrape import RankShares, oldest_waiting_s

Part = dict[str, Any]


def requests_part(stats: EngineStats, recent: RecentRequests, facts: DashboardFacts) -> Part:
    return {
        "running": stats.load.num_running,
        "waiting": stats.load.num_waiting,
        "oldest_waiting_s": round(oldest_waiting_s(stats), 3),
        "finished_total": recent.num_finished,
        "failed_total": recent.num_failed,
        "rejected_total": recent.num_rejected,
        "max_running": facts.max_running,
        "max_waiting": facts.max_waiting,
    }


def latency_part(recent: RecentRequests) -> Part:
    return {
        "window_s": LATENCY_WINDOW_S,
        "ttft_ms": recent.first_tokens.look(),
        "tpot_ms": recent.next_tokens.look(),
    }


def kv_part(stats: EngineStats, page_size: int) -> Part:
    """The KV cache. `used`: pages of sequences; `cached`: pages in the prefix cache, in use or
    not."""
    queried = stats.counts.num_queried_tokens
    memory = {
        "name": "memory",
        "pages": stats.load.num_pages,
        "used": stats.load.num_used_pages,
        "cached": stats.load.num_cached_pages,
    }
    return {
        "page_tokens": page_size,
        "tiers": [memory],
        "prefix_hit_rate": stats.counts.num_hit_tokens / queried if queried else None,
    }


def experts_part(load: ExpertLoad | None, counts: ExpertCounts | None) -> Part | None:
    if load is None or counts is None:
        return None
    mean = counts.activated_mean
    return {
        "num_layers": load.num_layers,
        "layers": load.layers,
        "num_experts": load.num_experts,
        "top_k": load.top_k,
        "window_s": WINDOW_S,
        "num_tokens": counts.num_tokens,
        "num_steps": counts.num_steps,
        "load": counts.rows_LE.tolist(),
        "activated_mean": None if mean is None else [round(each, 3) for each in mean.tolist()],
    }


def memory_part(stats: EngineStats) -> Part | None:
    memory = stats.expert_memory
    if memory is None:
        return None
    return {
        "resident_bytes": memory.resident_bytes,
        "budget_bytes": memory.budget_bytes,
        "hit_rate": memory.hit_rate,
    }


def ranks_part(stats: EngineStats, shares: RankShares | None) -> list[Part]:
    """The ranks. `load` is an expert rank's share of rows, or an attention rank's share of
    sequences."""
    loads: dict[str, float] = {}
    if shares is not None and shares.shares is not None:
        loads = {f"expert-{rank}": share for rank, share in enumerate(shares.shares)}
    running = sum(rank.load.num_running for rank in stats.ranks)
    if running:
        loads |= {rank.name: rank.load.num_running / running for rank in stats.ranks}
    return [
        {
            "name": rank.name,
            "kind": rank.pool,
            "phase": rank.phase,
            "load": loads.get(rank.name),
            "busy": rank.busy_ratio,
            "restarts": rank.num_restarts,
        }
        for rank in stats.members
    ]


def placement_part(brief: PlacementBrief | None, shares: RankShares | None) -> Part | None:
    if brief is None:
        return None
    last = brief.last
    return {
        "version": brief.version,
        "balance": None if shares is None else shares.balance,
        "num_replicas": 0 if shares is None else shares.num_replicas,
        "age_s": round(brief.age_s, 1),
        "state": brief.state,
        "last_move": None if last is None else f"{last.outcome}: {last.text}",
    }


def predictor_part(stats: EngineStats, facts: PredictorFacts | None) -> Part | None:
    if facts is None or stats.batching is None:
        return None
    return {
        "kind": facts.kind,
        "recall": stats.batching.recall,
        "floor": facts.floor,
        "is_acting": facts.is_followed and bool(stats.batching.is_predictor_on),
    }
