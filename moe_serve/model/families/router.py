"""Reads routers in the keys of DeepSeek's configs, which other families use as well."""

from __future__ import annotations

from typing import Any

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.spec import RouterSpec


def biased_sigmoid_router(config: HFConfig, *, scaling: float) -> RouterSpec:
    """Read DeepSeek-V3's router: a load-balancing bias per expert affects the choice only.

    `scaling` is the family's default of routed_scaling_factor.
    """
    config.one_of("scoring_func", ("sigmoid", "noaux_tc"), "sigmoid")  # dots.llm1's name for it
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
    """Return fields of RouterShape: numbers of experts and choices, and the factor of their
    weights.
    """
    return {
        "num_experts": config.positive_int("n_routed_experts", "num_local_experts", "num_experts"),
        "top_k": config.positive_int("num_experts_per_tok"),
        "scaling": config.number("routed_scaling_factor", scaling),
    }


def expert_groups(config: HFConfig) -> dict[str, Any]:
    """Return fields of RouterShape: the groups that experts are chosen from."""
    return {
        "num_groups": config.positive_int("n_group", default=1),
        "num_groups_kept": config.positive_int("topk_group", default=1),
    }
