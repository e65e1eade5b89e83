"""Routers as DeepSeek's configs, and those of others after them, state them."""

from __future__ import annotations

from typing import Any

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.spec import RouterSpec


def biased_sigmoid_router(config: HFConfig, *, scaling: float) -> RouterSpec:
    """DeepSeek-V3's: a bias per expert, which balances the load, takes part in the choice only.

    `scaling` is the family's default of routed_scaling_factor.
    """
    config.one_of("scoring_func", ("sigmoid", "noaux_tc"), "sigmoid")  # dots.llm1 names it so
    config.require("topk_method", "noaux_tc", default="noaux_tc")
    return RouterSpec(
        has_selection_bias=True,
        shape=RouterShape(
            **router_numbers(config, scaling=scaling),
            is_renormalised=bool(config.get("norm_topk_prob", True)),
            renorm_floor=1e-20,
            scoring="sigmoid",
            group_score="top2",
            **expert_groups(config),
        ),
    )


def router_numbers(config: HFConfig, *, scaling: float) -> dict[str, Any]:
    """Of RouterShape: how many experts, how many are chosen, and what their weights are times."""
    return {
        "num_experts": config.positive_int("n_routed_experts", "num_local_experts", "num_experts"),
        "top_k": config.positive_int("num_experts_per_tok"),
        "scaling": config.number("routed_scaling_factor", scaling),
    }


def expert_groups(config: HFConfig) -> dict[str, Any]:
    """Of RouterShape: the groups that experts are chosen from."""
    return {
        "num_groups": config.positive_int("n_group", default=1),
        "num_groups_kept": config.positive_int("topk_group", default=1),
    }
