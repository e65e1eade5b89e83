"""A made-up machine: its stage times, and its steps in a simulation."""

from __future__ import annotations

from collections.abc import Sequence

from moe_serve.pipeline.costs.cost_model import (
    AttentionCost,
    ExpertCost,
    Experts,
    LayerCosts,
    Line,
    LinkCosts,
    StageCosts,
)
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, StepTiming
from moe_serve.pipeline.costs.step_seconds import simulate_layers

NUM_LAYERS = 6


def synthetic_costs(
    *,
    attention: float = 1.0,
    experts: float = 1.0,
    weights: float = 1.0,
    transfer: float = 1.0,
    num_dense: int = 0,
) -> StageCosts:
    """Returns the costs of a small model on a CPU, each part times a factor."""
    cost = AttentionCost(
        alpha_s=5e-5 * attention, row_s=4e-6 * attention, kv_token_s=2e-9 * attention, pair_s=0.0
    )
    expert_cost = ExpertCost(
        alpha_s=5e-5 * experts, choice_s=1e-6 * experts, expert_s=4e-6 * weights
    )
    sparse = LayerCosts(num_layers=NUM_LAYERS, attention=cost, experts=expert_cost)
    dense = LayerCosts(num_layers=num_dense, attention=cost, experts=None)
    return StageCosts(
        layers=(dense, sparse) if num_dense else (sparse,),
        experts=Experts(num_experts=32, top_k=4, num_effective=28.0),
        row_bytes=512,
        width=256,
        link=LinkCosts(
            attention=Line(4e-6, 2e-10),
            experts=Line(3e-6, 2e-10),
            transfer=Line(5e-5 * transfer, 5e-10 * transfer),
        ),
        fixed=Line(5e-4, 5e-6),
        sampling=Line(0.0, 5e-6),
    )


def simulated_timing(
    costs: StageCosts, loads: Sequence[BatchLoad], num_parts: int, ranks: Ranks
) -> StepTiming:
    """Returns the timing of a step of `costs` in the discrete simulation."""
    parts = list(zip(*(load.split(num_parts) for load in loads), strict=True))
    layers = costs.layer_times(parts, ranks)
    attention_s = sum(t.num_layers * sum(t.attention_s) for t in layers)
    experts_s = sum(t.num_layers * sum(t.experts_s) for t in layers)
    seconds = simulate_layers(layers, ranks.num_attention, ranks.num_experts)
    return StepTiming(
        seconds=seconds + costs.fixed_seconds(loads),
        attention_s=attention_s,
        experts_s=experts_s,
        wait_s=max(0.0, seconds - attention_s),
    )
