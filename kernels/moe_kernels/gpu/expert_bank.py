"""A layer's experts on a GPU: their weights stacked, and the bank that runs them.

T rows, K choices, E experts, D model width, F expert width.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels.gpu.grouped_gemm.api import Chip, grouped_experts
from moe_kernels.gpu.grouped_gemm.experts import GroupedExperts
from moe_kernels.gpu.grouped_gemm.from_matrix import grouped_weight, joined
from moe_kernels.gpu.grouped_gemm.pack import GroupedWeight
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation

# Several threads load layers; only one layer at a time is in memory twice.
_STACKING = threading.Lock()


class GroupedExpertBank:
    """Implements ExpertBank: all activated experts in two launches.

    `places_E` [E + 1] gives each expert id its place among those here, -1 elsewhere and at its end,
    for id -1; None: all are here. A choice of an expert elsewhere adds nothing.
    """

    def __init__(self, experts: GroupedExperts, places_E: Tensor | None, chip: Chip) -> None:
        self._experts, self._places_E, self._chip = experts, places_E, chip

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._run(x_TD, expert_ids_TK, weights_TK, torch.float32)

    def partial(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._run(x_TD, expert_ids_TK, weights_TK, torch.float64)

    def _run(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        ids_TK = expert_ids_TK
        if self._places_E is not None:
            ids_TK = self._places_E[ids_TK]
        return grouped_experts(
            x_TD.contiguous(),
            ids_TK.contiguous(),
            weights_TK.contiguous(),
            self._experts,
            self._chip,
            out_dtype=out_dtype,
        )


def stacked_experts(
    experts: Sequence[ExpertWeights | None], activation: GatedActivation
) -> tuple[GroupedExperts, Tensor | None]:
    """The experts that are here, and the places of all ids (see GroupedExpertBank).

    `experts` is read once, in order, so it may read its tensors when it is asked for them.
    """
    gate_ups: list[GroupedWeight] = []
    downs: list[GroupedWeight] = []
    gate_up_biases: list[Tensor] = []
    down_biases: list[Tensor] = []
    places: list[int] = []
    for expert in experts:
        places.append(-1 if expert is None else len(downs))
        if expert is None:
            continue
        gate_ups.append(grouped_weight((expert.gate, expert.up)))
        downs.append(grouped_weight((expert.down,)))
        if expert.gate_bias is not None:
            assert expert.up_bias is not None and expert.down_bias is not None, "all biases or none"
            gate_up_biases.append(torch.cat((expert.gate_bias, expert.up_bias)))
            down_biases.append(expert.down_bias)
    assert downs, "a bank of no experts"
    with _STACKING:
        stacked = GroupedExperts(
            gate_up=_joined(gate_ups),
            down=_joined(downs),
            activation=activation,
            gate_up_bias=_stacked(gate_up_biases) if gate_up_biases else None,
            down_bias=_stacked(down_biases) if down_biases else None,
        )
    if -1 not in places:
        return stacked, None
    places.append(-1)
    return stacked, torch.tensor(places, dtype=torch.int64, device=stacked.down.values.device)


def _joined(experts: list[GroupedWeight]) -> GroupedWeight:
    """All experts' together; the parts are let go."""
    whole = joined(experts)
    experts.clear()
    return whole


def _stacked(tensors: list[Tensor]) -> Tensor:
    """One tensor; the parts are let go."""
    whole = torch.stack(tensors)
    tensors.clear()
    return whole
