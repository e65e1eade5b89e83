"""The router's choice in one kernel. T rows, E experts, K top-k."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.gpu.router.heuristics import router_config
from moe_kernels.gpu.router.kernel import route_rows
from moe_kernels.interface.routing import RouterShape


@dataclass(frozen=True, slots=True)
class RoutedChoices:
    """The router's choice, on the logits' device; filled by `route`."""

    ids_TK: Tensor  # ascending in a row; equal scores go to the lower id
    weights_TK: Tensor  # fp32
    counts_E: Tensor | None  # int32: rows of each expert


def route(
    logits_TE: Tensor,
    shape: RouterShape,
    selection_bias_E: Tensor | None = None,
    *,
    ids_dtype: torch.dtype = torch.int64,
    has_counts: bool = True,
) -> RoutedChoices:
    """Chooses each row's experts. Logits and bias are fp32, a row of logits is contiguous."""
    num_rows, num_experts = logits_TE.shape
    assert num_experts == shape.num_experts, f"{num_experts} logits for {shape.num_experts} experts"
    assert num_experts % shape.num_groups == 0, f"{num_experts} / {shape.num_groups} groups"
    assert 0 < shape.top_k <= num_experts, f"top-{shape.top_k} of {num_experts} experts"
    assert logits_TE.dtype == torch.float32, f"logits are {logits_TE.dtype}, not fp32"
    assert logits_TE.stride(1) == 1, f"a row of logits has stride {logits_TE.stride(1)}"
    if selection_bias_E is not None:
        assert selection_bias_E.dtype == torch.float32, f"the bias is {selection_bias_E.dtype}"
        assert selection_bias_E.is_contiguous(), "the selection bias must be contiguous"
    device = logits_TE.device
    ids_TK = torch.empty(num_rows, shape.top_k, dtype=ids_dtype, device=device)
    weights_TK = torch.empty(num_rows, shape.top_k, dtype=torch.float32, device=device)
    counts_E = torch.zeros(num_experts, dtype=torch.int32, device=device) if has_counts else None
    if num_rows:
        config = router_config(shape)
        route_rows[(num_rows,)](
            logits_TE,
            selection_bias_E,
            ids_TK,
            weights_TK,
            counts_E,
            logits_TE.stride(0),
            float(shape.renorm_floor),
            float(shape.scaling),
            NUM_EXPERTS=num_experts,
            TOP_K=shape.top_k,
            NUM_GROUPS=shape.num_groups,
            NUM_GROUPS_KEPT=shape.num_groups_kept,
            IS_TOP2=shape.group_score == "top2",
            IS_SIGMOID=shape.scoring == "sigmoid",
            IS_RENORMALISED=shape.is_renormalised,
            HAS_BIAS=selection_bias_E is not None,
            HAS_COUNTS=has_counts,
            BLOCK_G=config.block_groups,
            BLOCK_S=config.block_size,
            num_warps=config.num_warps,
        )
    return RoutedChoices(ids_TK, weights_TK, counts_E)
