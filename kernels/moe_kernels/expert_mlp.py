"""The expert stage's arithmetic: rows sorted by expert, one SwiGLU MLP per activated expert.

T rows, K choices per row, E experts here, D model width, F expert width, R = T * K routed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.linear import FastLinear, make_linear


@dataclass(frozen=True, slots=True)
class ExpertMLP:
    """One expert, ready to run: down(silu(gate(x)) * up(x))."""

    gate: FastLinear
    up: FastLinear
    down: FastLinear

    @classmethod
    def from_weights(cls, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> ExpertMLP:
        return cls(make_linear(gate_FD), make_linear(up_FD), make_linear(down_DF))

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.down(self.up.times(x_TD, self.gate.silu(x_TD)))


def routed_experts(
    x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, experts: Sequence[ExpertMLP | None]
) -> Tensor:
    """Weighted sum of each row's experts, [T, D] in fp32.

    `expert_ids_TK` must ascend within a row: the sum runs over the K choices in that order, so it
    does not depend on the batch. `experts[e]` may be None for an expert that no row chose.

    Worked example, T = 2, K = 2: ids [[0, 2], [1, 2]] -> order [0, 2, 1, 3], tokens [0, 1, 0, 1],
    counts [1, 1, 2]: expert 0 gets row 0, expert 1 row 1, expert 2 rows 0 and 1.
    """
    num_rows, top_k = expert_ids_TK.shape
    flat_R = expert_ids_TK.reshape(-1)
    order_R = torch.argsort(flat_R, stable=True)
    counts = torch.bincount(flat_R, minlength=len(experts)).tolist()
    sorted_RD = x_TD.index_select(0, order_R // top_k)
    outputs, start = [], 0
    for expert_id, count in enumerate(counts):
        if count:
            expert = experts[expert_id]
            assert expert is not None, f"rows were sent for expert {expert_id}, which is not here"
            outputs.append(expert(sorted_RD[start : start + count]))
            start += count
    y_RD = torch.cat(outputs)
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    y_TKD = y_RD.index_select(0, inverse_R).view(num_rows, top_k, -1)
    return combine_choices(y_TKD, weights_TK)


def combine_choices(y_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    """sum_k weights[:, k] * y[:, k] in fp32, k ascending, one addition after the other."""
    out_TD = y_TKD[:, 0].float() * weights_TK[:, 0:1]
    for k in range(1, y_TKD.shape[1]):
        out_TD += y_TKD[:, k].float() * weights_TK[:, k : k + 1]
    return out_TD


def routed_experts_reference(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    weights: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> Tensor:
    """The definition, in float64 and without sorting: `weights[e]` is (gate, up, down)."""
    x_TD, out_TD = x_TD.double(), torch.zeros_like(x_TD, dtype=torch.float64)
    for t, (ids, row_weights) in enumerate(
        zip(expert_ids_TK.tolist(), weights_TK.tolist(), strict=True)
    ):
        for expert_id, weight in zip(ids, row_weights, strict=True):
            gate, up, down = (w.double() for w in weights[expert_id])
            hidden = F.silu(x_TD[t] @ gate.t()) * (x_TD[t] @ up.t())
            out_TD[t] += weight * (hidden @ down.t())
    return out_TD
