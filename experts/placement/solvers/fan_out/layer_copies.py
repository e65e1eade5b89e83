"""The copies of one layer's experts, with the load of each and its device.

S scenarios, C copies (of experts, and then empty slots), D devices, E experts, N tokens, K choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.placement import RanksOf


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCopies:
    """Copies of expert 0 first, in the order of its ranks, then of expert 1; empty slots are copies
    of expert -1 without load. A search changes only the positions (`device_C`)."""

    expert_C: NDArray[np.int64]
    device_C: NDArray[np.int64]  # at the start
    loads_SC: NDArray[np.float64]  # scaled so that devices of speed 1 have 1 on average
    first_E: NDArray[np.int64]  # index of each expert's first copy

    @classmethod
    def of(cls, ranks_of: RanksOf, each_SE: NDArray[np.float64]) -> LayerCopies:
        """Make the copies; `each_SE` is the load of one copy."""
        counts_E = np.array([len(ranks) for ranks in ranks_of])
        expert_C = np.repeat(np.arange(len(ranks_of)), counts_E)
        return cls(
            expert_C=expert_C,
            device_C=np.array([rank for ranks in ranks_of for rank in ranks], dtype=np.int64),
            loads_SC=each_SE[:, expert_C],
            first_E=np.concatenate(([0], np.cumsum(counts_E)[:-1])),
        )

    def with_empty(self, empty_D: NDArray[np.int64]) -> LayerCopies:
        """Add empty slots; `empty_D` counts the unused slots, into which a copy may move."""
        num_empty = int(empty_D.sum())
        device_n = np.repeat(np.arange(len(empty_D)), empty_D)
        return LayerCopies(
            expert_C=np.concatenate((self.expert_C, np.full(num_empty, -1))),
            device_C=np.concatenate((self.device_C, device_n)),
            loads_SC=np.pad(self.loads_SC, ((0, 0), (0, num_empty))),
            first_E=self.first_E,
        )

    def chosen_copies(self, layer: int, expert_ids_NK: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the copy that serves each choice; copies take turns as in `ReplicaChoice`."""
        counts_E = np.bincount(self.expert_C[self.expert_C >= 0], minlength=len(self.first_E))
        rows_N1 = np.arange(len(expert_ids_NK))[:, None]
        turns_NK = (rows_N1 + expert_ids_NK + layer) % counts_E[expert_ids_NK]
        return self.first_E[expert_ids_NK] + turns_NK

    def ranks_of(self, device_C: NDArray[np.int64]) -> RanksOf:
        """Return the ranks of each expert as a placement has them; copies keep their turns."""
        parts: list[list[int]] = [[] for _ in self.first_E]
        for expert, device in zip(self.expert_C.tolist(), device_C.tolist(), strict=True):
            if expert >= 0:
                parts[expert].append(device)
        return tuple(map(tuple, parts))
