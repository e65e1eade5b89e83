"""The experts that single tokens chose in all layers. Fan-out and per-step balance need them; loads
do not suffice.

N tokens, L layers, K choices of a token in a layer, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.errors import PlacementError
from experts.placement.problem.loads import ExpertLoads


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoices:
    """The choices of N tokens, in descending score if the source knew the scores."""

    expert_ids_NLK: NDArray[np.integer]
    num_experts: int
    layers: tuple[int, ...]  # the model's numbers

    def __post_init__(self) -> None:
        shape = self.expert_ids_NLK.shape
        if len(shape) != 3 or 0 in shape or shape[1] != len(self.layers):
            raise PlacementError(
                f"Choices must have the shape tokens x {len(self.layers)} layers x k, got {shape}."
            )
        low, high = int(self.expert_ids_NLK.min()), int(self.expert_ids_NLK.max())
        if low < 0 or high >= self.num_experts:
            raise PlacementError(
                f"Expert ids must be 0 to {self.num_experts - 1}, got {low} to {high}."
            )

    def loads(self, name: str) -> ExpertLoads:
        """Count the choices as the loads of one scenario."""
        num_layers = len(self.layers)
        offsets_L1 = np.arange(num_layers)[:, None] * self.num_experts
        counts = np.bincount(
            (self.expert_ids_NLK + offsets_L1).ravel(), minlength=num_layers * self.num_experts
        )
        counts_1LE = counts.reshape(1, num_layers, self.num_experts).astype(np.float64)
        return ExpertLoads(counts_SLE=counts_1LE, layers=self.layers, scenarios=(name,))
