"""The experts of a layer as the grouped products take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_kernels.gpu.grouped_gemm.pack import GroupedWeight
from moe_kernels.interface.kernels import GatedActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedExperts:
    """E experts of width F in a model of width D, all weights on one device.

    Biases are [E, 2 F] (gate, then up) and [E, D], in the model's dtype, or None.
    """

    gate_up: GroupedWeight
    down: GroupedWeight
    activation: GatedActivation = GatedActivation()
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __post_init__(self) -> None:
        gate_up, down = self.gate_up, self.down
        assert (gate_up.num_parts, down.num_parts) == (2, 1), "gate and up, then down"
        assert gate_up.num_experts == down.num_experts, "as many downs as gates"
        assert (gate_up.num_outputs, gate_up.num_inputs) == (down.num_inputs, down.num_outputs), (
            f"gate and up are {gate_up.num_outputs} x {gate_up.num_inputs}, "
            f"down {down.num_outputs} x {down.num_inputs}"
        )

    @property
    def num_experts(self) -> int:
        return self.gate_up.num_experts

    @property
    def width(self) -> int:
        """D."""
        return self.gate_up.num_inputs

    @property
    def expert_width(self) -> int:
        """F."""
        return self.gate_up.num_outputs
