"""Made-up answers of GET /dashboard/state, for states that are hard to get from a real server."""

from __future__ import annotations

import math
from typing import Any

NUM_LAYERS, NUM_EXPERTS, TOP_K = 6, 16, 2
HISTORY_S = 120
_OPTIONAL = ("expert_memory", "placement", "predictor", "speculation", "service", "adapters")


def fake_state(now: float, started: float, *, num_ranks: int = 3) -> dict[str, Any]:
    """Returns the state of a busy server with one attention rank and `num_ranks - 1` expert
    ranks."""
    return {
        "server": {
            "name": "moe-serve",
            "version": "0.0.test",
            "model": "made-up",
            "started": started,
            "uptime_s": now - started,
            "is_ready": True,
            "layout": f"1 attention rank, {num_ranks - 1} expert ranks",
        },
        "now": now,
        "requests": {
            "running": 12,
            "waiting": 3,
            "oldest_waiting_s": 4.2,
            "finished_total": 12_345,
            "failed_total": 1,
            "rejected_total": 2,
            "max_running": 64,
            "max_waiting": 256,
        },
        "tokens": {"prompt_total": 1_234_567, "generated_total": 890_123},
        "latency": {
            "window_s": 60,
            "ttft_ms": {"p50": 41.2, "p90": 88.0, "p99": 140.9, "count": 210},
            "tpot_ms": {"p50": 7.9, "p90": 9.8, "p99": 15.1, "count": 198},
        },
        "kv": {
            "page_tokens": 16,
            "tiers": [
                {"name": "memory", "pages": 1000, "used": 420, "cached": 130},
            ],
            "store": {
                "name": "disk",
                "pages": 900,
                "bytes": 900 * 2**20,
                "capacity_bytes": 8 * 2**30,
                "state": "",
                "memory": {
                    "name": "memory",
                    "pages": 300,
                    "bytes": 300 * 2**20,
                    "capacity_bytes": 2**30,
                    "state": "",
                    "memory": None,
                },
            },
            "prompt_tokens": {"prefix_cache": 200_000, "store": 60_000, "computed": 390_000},
            "prefix_hit_rate": 0.4,
            "window": {"requests": 3, "dropped_pages": 1234},
        },
        "experts": _experts(),
        "expert_memory": {"resident_bytes": 3 * 2**30, "hit_rate": 0.91},
        "ranks": _ranks(num_ranks),
        "placement": {
            "version": 3,
            "balance": 0.93,
            "num_replicas": 2,
            "age_s": 312.0,
            "last_move": "2 experts of layer 1 from expert-0 to expert-1",
        },
        "cell_placements": [],
        "predictor": {"kind": "request", "recall": 0.62, "floor": 0.2, "is_acting": True},
        "speculation": {
            "drafters": "auto: ngram, suffix, prediction, grammar; at most 16 tokens",
            "drafted_total": 4000,
            "accepted_total": 3280,
            "acceptance": 0.82,
            "tokens_per_step": 1.9,
            "accepted_by_source": {"ngram": 3280},
        },
        "service": _service(),
        "adapters": _adapters(),
        "step": _step(num_ranks),
        "history": _history(now),
        "events": [
            {"seq": 1, "time": started, "kind": "started", "text": "The server is ready."},
            {"seq": 2, "time": now - 300, "kind": "rebalanced", "text": "2 experts moved."},
        ],
    }


def idle_state(now: float, started: float) -> dict[str, Any]:
    """Returns the state of one process before its first request: everything that may be null is
    null."""
    state = fake_state(now, started, num_ranks=3)
    state["server"]["layout"] = "one process"
    state["requests"] = dict.fromkeys(state["requests"], 0) | {"max_running": 64}
    state["latency"] = {"window_s": 60, "ttft_ms": None, "tpot_ms": None}
    state["kv"] = {
        "page_tokens": 16,
        "tiers": [],
        "store": None,
        "prompt_tokens": {"prefix_cache": 0, "store": 0, "computed": 0},
        "prefix_hit_rate": None,
        "window": None,
    }
    state["experts"]["num_tokens"] = 0
    state["experts"]["load"] = [[0] * NUM_EXPERTS for _ in range(NUM_LAYERS)]
    state["experts"]["activated_mean"] = None
    state |= dict.fromkeys((*_OPTIONAL, "step"))
    state["ranks"] = []
    state["history"] = {"interval_s": 1, **{name: [] for name in state["history"]["_names"]}}
    state["events"] = []
    return state


def _adapters() -> dict[str, Any]:
    common = {"version": "3f9a0c1d", "loaded_at": 0, "rank": 0, "waiting": 0}
    return {
        "number": 57,
        "in_memory_bytes": 1_500 * 2**20,
        "memory_bytes": 2 * 2**30,
        "pinned_bytes": 96 * 2**20,
        "loads_total": 90,
        "evictions_total": 33,
        "adapters": [
            common
            | {
                "name": "support-assistant",
                "kind": "lora",
                "rank": 16,
                "bytes": 96 * 2**20,
                "running": 7,
                "waiting": 2,
                "is_pinned": True,
                "state": "in memory",
            },
            common
            | {
                "name": "team/legal:<i>contracts</i>@2026-11-with-a-rather-long-name",
                "kind": "bitdelta",
                "bytes": 1_404 * 2**20,
                "running": 1,
                "is_pinned": False,
                "state": "in memory",
            },
            common
            | {
                "name": "sql",
                "kind": "esft",
                "bytes": 412 * 2**20,
                "running": 0,
                "is_pinned": False,
                "state": "dropped",
            },
        ],
    }


def _service() -> dict[str, Any]:
    def tier(name: str, weight: float, targets: dict[str, float], good: float) -> dict[str, Any]:
        return {
            "name": name,
            "weight": weight,
            "targets": targets,
            "finished": 1234,
            "good": good,
            "attained": dict.fromkeys(targets, (1 + good) / 2),
            "mean_tardiness_s": 1 - good,
            "finished_total": 56_789,
            "refused_total": 12,
            "expired_total": 1,
            "relegated_total": 34,
            "runaways_total": 5,
            "kept_total": 97,
            "broken_total": 3,
        }

    def tenant(name: str, share: float) -> dict[str, Any]:
        counts = {"service_s": 100 * share, "finished": 7, "good": 0.9}
        return {"tier": "interactive", "name": name, "share": share, **counts}

    return {
        "order": "atc",
        "window_s": 300,
        "tiers": [
            tier("interactive", 4.0, {"ttft": 1.0, "tpot": 0.1}, 0.96),
            tier("standard", 2.0, {"ttft": 5.0}, 0.71),
            {
                **tier("flex", 1.0, {"e2e": 600.0}, 0.0),
                **{"finished": 0, "good": None, "attained": {}, "mean_tardiness_s": None},
            },
        ],
        "tenants": [tenant("acme", 0.63), tenant("user:<b>bob</b>", 0.3), tenant("key:01ab", 0.07)],
        "num_tenants": 27,
        "jain_index": 0.62,
        "forecast": {"num_compared": 1000, "median_error": 0.14},
    }


def _experts() -> dict[str, Any]:
    load = [
        [round(100 * (1.1 + math.sin(3.1 * layer + 1.7 * e)) ** 2) for e in range(NUM_EXPERTS)]
        for layer in range(NUM_LAYERS)
    ]
    load[2][5] = 4000
    load[3][7] = 0
    return {
        "num_layers": NUM_LAYERS,
        "layers": list(range(NUM_LAYERS)),
        "num_experts": NUM_EXPERTS,
        "top_k": TOP_K,
        "window_s": 60,
        "num_tokens": 8421,
        "load": load,
        "activated_mean": [9.5 + layer / 2 for layer in range(NUM_LAYERS)],
    }


def _ranks(num_ranks: int) -> list[dict[str, Any]]:
    expert_loads = [0.57, 0.43, 0.0, 0.0][: num_ranks - 1]
    ranks = [{"name": "attention-0", "kind": "attention", "load": 1.0, "busy": 0.71}]
    for i, load in enumerate(expert_loads):
        ranks.append({"name": f"expert-{i}", "kind": "expert", "load": load, "busy": 0.4 + 0.1 * i})
    return [{**rank, "phase": "serving", "restarts": 0} for rank in ranks]


def _step(num_ranks: int) -> dict[str, Any]:
    """Returns a step of two micro-batches: the experts compute one while attention computes the
    other."""
    attention, experts = [], []
    for layer in range(NUM_LAYERS):
        for micro_batch in range(2):
            start = 0.6 * (2 * layer + micro_batch)
            where = {"layer": layer, "micro_batch": micro_batch}
            attention += [
                {"start_ms": start, "end_ms": start + 0.4, "kind": "attention", **where},
                {"start_ms": start + 0.4, "end_ms": start + 0.47, "kind": "dispatch", **where},
                {"start_ms": start + 0.47, "end_ms": start + 0.6, "kind": "wait_combine", **where},
            ]
            experts.append(
                {"start_ms": start + 0.5, "end_ms": start + 1.0, "kind": "experts", **where}
            )
    tracks = [{"name": "attention-0", "spans": attention}]
    tracks += [{"name": f"expert-{i}", "spans": experts} for i in range(num_ranks - 1)]
    return {
        "number": 77,
        "duration_ms": 7.9,
        "micro_batches": 2,
        "why": "planned",
        "tracks": tracks,
    }


def _history(now: float) -> dict[str, Any]:
    ages = range(HISTORY_S - 1, -1, -1)
    waves = [math.sin(age / 9) for age in ages]
    columns: dict[str, list[float | None]] = {
        "t": [now - age for age in ages],
        "running": [12 + round(4 * wave) for wave in waves],
        "waiting": [max(0, round(4 * wave)) for wave in waves],
        "prompt_per_s": [900 + 300 * wave for wave in waves],
        "generated_per_s": [1500 + 200 * wave for wave in waves],
        "ttft_ms": [None if i % 7 == 0 else 45 + 20 * wave for i, wave in enumerate(waves)],
        "tpot_ms": [None if i % 5 == 0 else 8 + wave for i, wave in enumerate(waves)],
        "kv_used": [420 + 50 * wave for wave in waves],
    }
    return {"interval_s": 1, "_names": list(columns), **columns}
