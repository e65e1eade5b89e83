"""Keeps a changing set of experts on a GPU: stacked slots, and banks with tables of places.

T rows, K choices, E experts, D model width. A slot is written in the writer's stream:
copies queue behind kernels that still read what was there, and before those that read what comes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_kernels.gpu.expert_bank import GroupedExpertBank
from moe_kernels.gpu.grouped_gemm.api import Chip
from moe_kernels.gpu.grouped_gemm.experts import GroupedExperts
from moe_kernels.gpu.grouped_gemm.from_matrix import grouped_weight
from moe_kernels.gpu.grouped_gemm.pack import GroupedWeight
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation


class GroupedSlots:
    """Implements ExpertSlots. `chip`, which its banks use, is set by the set of kernels."""

    def __init__(
        self, sample: ExpertWeights, activation: GatedActivation, max_bytes: int, most: int
    ) -> None:
        one = _one_expert(sample, activation)
        self.slot_bytes = sum(part.nbytes for part in _parts(one))
        self.num_slots = min(most, max_bytes // self.slot_bytes)
        self.stacked = _room(one, max(1, self.num_slots))
        self.chip: Chip | None = None
        self.write(0, sample)  # so that the chip can be asked

    def write(self, slot: int, weights: ExpertWeights) -> None:
        one = _one_expert(weights, self.stacked.activation)
        for room, part in zip(_parts(self.stacked), _parts(one), strict=True):
            room[slot].copy_(part[0])

    def bank(self, num_experts: int) -> GroupedSlotBank:
        assert self.chip is not None, "the chip is not known yet"
        return GroupedSlotBank(self.stacked, num_experts, self.chip)


class GroupedSlotBank(GroupedExpertBank):
    """Implements SlotBank: places change."""

    def __init__(self, stacked: GroupedExperts, num_experts: int, chip: Chip) -> None:
        device = stacked.down.values.device
        self._changing_E = torch.full((num_experts + 1,), -1, dtype=torch.int64, device=device)
        super().__init__(stacked, self._changing_E, chip)

    def point(self, expert: int, slot: int | None) -> None:
        self._changing_E[expert] = -1 if slot is None else slot


def _one_expert(weights: ExpertWeights, activation: GatedActivation) -> GroupedExperts:
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if weights.gate_bias is not None:
        assert weights.up_bias is not None and weights.down_bias is not None, "all biases or none"
        biases = (torch.cat((weights.gate_bias, weights.up_bias))[None], weights.down_bias[None])
    return GroupedExperts(
        gate_up=grouped_weight((weights.gate, weights.up)),
        down=grouped_weight((weights.down,)),
        activation=activation,
        gate_up_bias=biases[0],
        down_bias=biases[1],
    )


def _parts(experts: GroupedExperts) -> list[Tensor]:
    """All tensors, in one order; the first dimension is the expert's."""
    weights = (experts.gate_up, experts.down)
    parts = [part for w in weights for part in (w.values, w.scales, w.zeros)]
    parts += [experts.gate_up_bias, experts.down_bias]
    return [part for part in parts if part is not None]


def _room(one: GroupedExperts, num_slots: int) -> GroupedExperts:
    """Allocate zeros for `num_slots` experts like this one."""

    def stacked(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.new_zeros(num_slots, *part.shape[1:])

    def weight(of: GroupedWeight) -> GroupedWeight:
        values = stacked(of.values)
        assert values is not None, "a weight has values"
        return replace(of, values=values, scales=stacked(of.scales), zeros=stacked(of.zeros))

    return replace(
        one,
        gate_up=weight(one.gate_up),
        down=weight(one.down),
        gate_up_bias=stacked(one.gate_up_bias),
        down_bias=stacked(one.down_bias),
    )
