"""Renders the table of metrics in docs/operate/observability.md from a server with every feature.

    PYTHONPATH=scripts python -m tables.metrics_table            print it
    PYTHONPATH=scripts python -m tables.metrics_table --write    put it into the page

tests/deploy/test_deploy_metrics.py holds the page, the dashboard and the alerts to the same server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from experts.memory.memory_stats import MemoryStats
from experts.placement.problem.placement import contiguous
from moe_serve.engine.memory.memory_plan import MemoryPlan, ProcessMemory
from moe_serve.engine.request.client import EngineStats
from moe_serve.engine.request.policy_stats import PolicyStats
from moe_serve.engine.request.pool_stats import MicroBatchCount, Pool, PoolStats, PoolUse, StageUse
from moe_serve.engine.request.rank_status import RankStatus
from moe_serve.engine.request.request import FinishReason
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.routes.placement_control import OUTCOMES, BalanceFigures, PlacementStatus
from moe_serve.engine.routes.route_records import RouteRecord
from moe_serve.engine.tracing import TracingStatus
from moe_serve.engine.watch.expert_load import ExpertLoad
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.metrics.collectors import ExpertCollector, ServerCollector
from moe_serve.http.metrics.family_maker import PREFIX
from moe_serve.http.metrics.metrics import RejectionReason, ServerMetrics
from moe_serve.http.metrics.metrics_alias import SAME_AS_VLLM
from routing_predictor.traces.recording import RecordingStats
from tables.page_block import PageBlock

BLOCK = PageBlock(
    Path(__file__).resolve().parents[2] / "docs" / "operate" / "observability.md",
    "<!-- metrics: begin -->",
    "<!-- metrics: end -->",
)
HEADER = "| metric | kind | labels | |\n|---|---|---|---|"


def full_stats() -> EngineStats:
    """Statistics of an engine with ranks, an expert memory and a batch policy with a predictor."""
    pools: tuple[Pool, ...] = ("attention", "expert")
    return EngineStats(
        num_steps=1,
        num_running=1,
        num_waiting=1,
        num_pages=4,
        num_free_pages=2,
        num_preemptions=1,
        num_prompt_tokens=1,
        num_generated_tokens=1,
        is_alive=True,
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
        members=(
            RankStatus(
                name="expert-0", pool="expert", phase="serving", num_restarts=0, busy_ratio=0.5
            ),
        ),
    )


def full_metrics() -> str:
    """Return the text of such a server's /metrics after one request of each outcome."""
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
    engine: Any = SimpleNamespace(stats=lambda: stats)
    tracing: Any = SimpleNamespace(status=lambda: recorded)
    placement: Any = SimpleNamespace(status=lambda: status, plan=lambda: plan)
    metrics = ServerMetrics(engine, "m", tracing, placement, tool_parser="hermes")
    metrics.registry.register(ServerCollector(engine, lambda: False, "m", _planned_start()))
    metrics.registry.register(ExpertCollector(_counted_load(), placement, "m", has_each=True))
    for finished in FinishReason:
        metrics.observe_end(1.0, finished)
    for reasons in get_args(RejectionReason):
        for rejected in get_args(reasons):
            metrics.count_rejection(rejected)
    metrics.count_http_request("/metrics", 500, 0.1)
    return metrics.render().decode()


def _planned_start() -> Startup:
    """The start of one process, with every phase begun."""
    startup = Startup()
    process = ProcessMemory(name="server", device="cpu", weights=2, kv_bytes=1, buffers=1)
    startup.plan = MemoryPlan(processes=(process,), rooms=())
    for phase in ("loading", "preparing", "ready"):
        startup.begin(phase)
    return startup


def _counted_load() -> ExpertLoad:
    """One layer of four experts, and a step of one token that chose two."""
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


def render() -> str:
    """Returns one row for each metric, in the order of the page."""
    rows = [HEADER]
    for family in text_string_to_metric_families(full_metrics()):
        rows.append("| " + " | ".join(_cells(family)) + " |")
    return "\n".join(rows) + "\n"


def _cells(family: Metric) -> Iterator[str]:
    suffix = family.name.removeprefix(PREFIX)
    shown = f"{suffix}_total" if family.type == "counter" else suffix
    yield f"`{shown}`"
    yield family.type + (", also vLLM's" if suffix in SAME_AS_VLLM else "")
    labels = {label for sample in family.samples for label in sample.labels}
    yield ", ".join(f"`{label}`" for label in sorted(labels - {"model_name", "le"}))
    yield family.documentation.replace("|", "\\|")


if __name__ == "__main__":
    BLOCK.main(render, "The table of docs/operate/observability.md.")
