"""Experts that come and go, in plain torch: a slot is an expert ready to run.

T rows, K choices per row, D model width.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels.interface.kernels import ExpertWeights, GatedActivation
from moe_kernels.reference.expert_mlp import ExpertMLP, QuantisedMLP, made_mlp, routed_experts


class TorchSlots:
    """Implements ExpertSlots. Overwritten experts are freed, so it never holds more than asked for.

    A slot counts as the bytes of its matrices; packed by oneDNN they are about as many.
    """

    def __init__(
        self, sample: ExpertWeights, activation: GatedActivation, max_bytes: int, most: int
    ) -> None:
        self.slot_bytes = sample.num_bytes
        self.num_slots = min(most, max_bytes // self.slot_bytes)
        self._activation = activation
        self._slots: list[ExpertMLP | QuantisedMLP | None] = [None] * self.num_slots

    def write(self, slot: int, weights: ExpertWeights) -> None:
        self._slots[slot] = None  # what was there goes first
        self._slots[slot] = made_mlp(weights, self._activation)

    def bank(self, num_experts: int) -> TorchSlotBank:
        return TorchSlotBank(self._slots, num_experts)


class TorchSlotBank:
    """Implements SlotBank: as TorchExperts, over slots."""

    def __init__(self, slots: list[ExpertMLP | QuantisedMLP | None], num_experts: int) -> None:
        self._slots = slots
        self._experts: list[ExpertMLP | QuantisedMLP | None] = [None] * num_experts

    def point(self, expert: int, slot: int | None) -> None:
        self._experts[expert] = None if slot is None else self._slots[slot]

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.partial(x_TD, expert_ids_TK, weights_TK).float()

    def partial(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return routed_experts(x_TD, expert_ids_TK, weights_TK, self._experts)
