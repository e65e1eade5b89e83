"""What single tokens chose in all layers: for what loads cannot say (fan-out, steps, affinity).

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
    """The choices of N tokens, in descending score where the source knew it."""

    expert_ids_NLK: NDArray[np.integer]
    num_experts: int
    layers: tuple[int, ...]  # the model's numbers

    def __post_init__(self) -> None:
        shape = self.expert_ids_NLK.shape
        if len(shape) != 3 or 0 in shape or shape[1] != len(self.layers):
            raise PlacementError(
                f"Choices have the shape {shape}; tokens x {len(self.layers)} layers x k is wanted."
            )
        low, high = int(self.expert_ids_NLK.min()), int(self.expert_ids_NLK.max())
        if low < 0 or high >= self.num_experts:
            raise PlacementError(f"Experts {low} to {high} are chosen, of {self.num_experts}.")

    def loads(self, name: str) -> ExpertLoads:
        """Counted, as one scenario."""
        num_layers = len(self.layers)
        offsets_L1 = np.arange(num_layers)[:, None] * self.num_experts
        counts = np.bincount(
            (self.expert_ids_NLK + offsets_L1).ravel(), minlength=num_layers * self.num_experts
        )
        counts_1LE = counts.reshape(1, num_layers, self.num_experts).astype(np.float64)
        return ExpertLoads(counts_SLE=counts_1LE, layers=self.layers, scenarios=(name,))
