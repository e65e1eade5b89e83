"""The experts of a layer on a GPU: their weights stacked, the bank that runs them, and slots whose
experts change.

T rows, K choices per row, E experts, D model width, F expert width. A slot is written in the
writer's stream: copies queue behind kernels that still read what was there, and before those that
read what comes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_kernels.gpu.grouped_gemm.api import Chip, SlotAdditions, grouped_experts
from moe_kernels.gpu.grouped_gemm.experts import GroupedExperts
from moe_kernels.gpu.grouped_gemm.from_matrix import grouped_weight, joined
from moe_kernels.gpu.grouped_gemm.pack import GroupedWeight
from moe_kernels.gpu.signs.api import SlotSigns
from moe_kernels.interface.adapters import RowAdditions
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

    def added_partial(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, added: RowAdditions
    ) -> Tensor:
        """See AddingBank."""
        widths = (self._experts.width, self._experts.expert_width)
        signs = SlotSigns(expert_ids_TK, added, widths)
        return self._run(x_TD, signs.kept_ids_TK, weights_TK, torch.float64, signs)

    def _run(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        out_dtype: torch.dtype,
        additions: SlotAdditions | None = None,
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
            additions=additions,
        )


def stacked_experts(
    experts: Sequence[ExpertWeights | None], activation: GatedActivation
) -> tuple[GroupedExperts, Tensor | None]:
    """Returns the experts that are here, and the places of all ids (see GroupedExpertBank).

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
    """Joins the weights of all experts and releases the parts."""
    whole = joined(experts)
    experts.clear()
    return whole


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Stacks the tensors and releases the parts."""
    whole = torch.stack(tensors)
    tensors.clear()
    return whole


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
    """Implements SlotBank. The places of experts change."""

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
    """Returns all tensors in a fixed order; the first dimension is the expert's."""
    weights = (experts.gate_up, experts.down)
    parts = [part for w in weights for part in (w.values, w.scales, w.zeros)]
    parts += [experts.gate_up_bias, experts.down_bias]
    return [part for part in parts if part is not None]


def _room(one: GroupedExperts, num_slots: int) -> GroupedExperts:
    """Allocates zeros for `num_slots` experts like this one."""

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
