"""Calibrations made up for tests."""

from __future__ import annotations

from moe_serve.pipeline.costs.cost_model import (
    AttentionCost,
    ExpertCost,
    Experts,
    LayerCosts,
    Line,
    LinkCosts,
    StageCosts,
)
from moe_serve.planning.calibration_file import (
    SCHEMA,
    CalibratedModel,
    Calibration,
    FitReport,
    HttpCosts,
    MachineFacts,
)

GIB = 2**30
HTTP = HttpCosts(request=Line(2e-3, 1e-5), begin_s=5e-4, chunk_s=1e-4, step=Line(2e-4, 3e-5))


def gpu_calibration() -> Calibration:
    """Returns times like those of a 235B model on cards of 141 GB: the weights leave little room
    for KV pages, attention over them takes most of a step, and every expert is read in every
    step."""
    layer = LayerCosts(
        num_layers=94,
        attention=AttentionCost(alpha_s=3e-5, row_s=5e-8, kv_token_s=5e-10, pair_s=0.0),
        experts=ExpertCost(alpha_s=2e-5, choice_s=1e-9, expert_s=2.5e-6),
    )
    return calibration_of(
        layer,
        transfer=Line(2e-5, 4e-12),
        attention_bytes=8 * GIB,
        expert_bytes=110 * GIB,
        kv_token_bytes=96 * 1024,
        max_context=131072,
    )


def cpu_calibration() -> Calibration:
    """Returns times like those of a small model on a CPU that has room for all of it."""
    layer = LayerCosts(
        num_layers=6,
        attention=AttentionCost(alpha_s=1e-5, row_s=2e-6, kv_token_s=1e-8, pair_s=4e-9),
        experts=ExpertCost(alpha_s=1e-6, choice_s=4e-7, expert_s=1.6e-6),
    )
    return calibration_of(
        layer,
        transfer=Line(5e-5, 1.3e-10),
        attention_bytes=5 * 2**20,
        expert_bytes=28 * 2**20,
        kv_token_bytes=3072,
        max_context=2048,
    )


def calibration_of(
    layer: LayerCosts,
    *,
    transfer: Line,
    attention_bytes: int,
    expert_bytes: int,
    kv_token_bytes: int,
    max_context: int,
) -> Calibration:
    link = LinkCosts(attention=Line(0.0, 0.0), experts=Line(0.0, 0.0), transfer=transfer)
    return Calibration(
        schema=SCHEMA,
        model=CalibratedModel(
            name="made-up",
            identity="00",
            family="qwen3_moe",
            dtype="bfloat16",
            num_layers=layer.num_layers,
            max_context=max_context,
            attention_bytes=attention_bytes,
            expert_bytes=expert_bytes,
            kv_token_bytes=kv_token_bytes,
        ),
        machine=MachineFacts(
            host="made up",
            device="made up",
            num_threads=1,
            kernels="none",
            torch="none",
            moe_serve="0",
        ),
        costs=StageCosts(
            layers=(layer,),
            experts=Experts(num_experts=128, top_k=8, num_effective=120.0),
            row_bytes=8192,
            width=4096,
            link=link,
            fixed=Line(1e-4, 1e-6),
            sampling=Line(0.0, 1e-6),
        ),
        network=LinkCosts(
            attention=Line(1e-4, 0.0), experts=Line(1e-4, 0.0), transfer=Line(1e-3, 1e-9)
        ),
        fits=(
            FitReport(name="T_a", num_samples=3, r_squared=0.99, median_error=0.01, max_error=0.02),
        ),
        seconds=1.0,
    )
