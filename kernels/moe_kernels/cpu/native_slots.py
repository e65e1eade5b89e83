"""Experts that come and go, in the native kernels: memory for some, and tables that point there."""

from __future__ import annotations

from moe_kernels.cpu.native_experts import ExpertPanels, ExpertTable, PackedExpert
from moe_kernels.cpu.native_library import NativeLibrary
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation

_UNIT_BYTES = 4


class NativeSlots:
    """Implements ExpertSlots. Memory for all slots is reserved at once."""

    def __init__(
        self,
        native: NativeLibrary,
        sample: ExpertWeights,
        activation: GatedActivation,
        max_bytes: int,
        most: int,
    ) -> None:
        self._panels, self._activation = ExpertPanels.of(native, sample), activation
        size = sum(self._panels.sizes)
        biases = (sample.gate_bias, sample.up_bias, sample.down_bias)
        num_biases = sum(0 if bias is None else bias.numel() for bias in biases)
        self.slot_bytes = _UNIT_BYTES * (size + num_biases)
        self.num_slots = min(most, max_bytes // self.slot_bytes)
        self._memory = native.empty_packed(self.num_slots, size)
        self._packed: list[PackedExpert | None] = [None] * self.num_slots

    def write(self, slot: int, weights: ExpertWeights) -> None:
        self._packed[slot] = self._panels.pack(weights, self._memory[slot])

    def bank(self, num_experts: int) -> NativeSlotBank:
        return NativeSlotBank(self._packed, self._panels, num_experts, self._activation)


class NativeSlotBank(ExpertTable):
    """Implements SlotBank: a table whose experts are named by their slots."""

    def __init__(
        self,
        packed: list[PackedExpert | None],
        panels: ExpertPanels,
        num_experts: int,
        activation: GatedActivation,
    ) -> None:
        super().__init__(panels, num_experts, activation)
        self._packed = packed

    def point(self, expert: int, slot: int | None) -> None:
        if slot is None:
            self.drop(expert)
            return
        packed = self._packed[slot]
        assert packed is not None, f"slot {slot} is empty"
        self.put(expert, packed)
