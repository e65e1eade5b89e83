"""Places prompts on micro-batches so that the loads of the expert ranks are even.

Reading prompts is bound by work: a layer of a micro-batch takes as long as its busiest rank. So
prompts are placed longest first where the sum over layers of the busiest rank's rows grows least,
among the groups whose size is close to the smallest.

L layers, E experts, K ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.placement import Placement, RanksOf
from moe_serve.engine.schedule.policy.concave_cost import Floats
from moe_serve.model.step_plan import SequenceSlice


class RankLoads:
    """Computes the load of each rank from signatures, under the placement in force."""

    def __init__(self, placement: Placement) -> None:
        shape = (len(placement.ranks_of), placement.num_experts, placement.num_ranks)
        self._share_LEK = np.zeros(shape, dtype=np.float32)
        self._ranks_of: dict[int, RanksOf] = {}
        self.use(placement)

    def use(self, placement: Placement) -> None:
        """Switches to a new placement. The cost is proportional to the number of layers that
        change."""
        for row, layer in enumerate(sorted(placement.ranks_of)):
            experts = placement.ranks_of[layer]
            if self._ranks_of.get(layer) == experts:
                continue
            self._ranks_of[layer] = experts
            self._share_LEK[row] = 0.0
            for expert, ranks in enumerate(experts):
                self._share_LEK[row, expert, list(ranks)] = 1 / max(1, len(ranks))

    def of(self, signature: Floats, num_tokens: int) -> NDArray[np.float32]:
        """Returns [L, K]: the rows that `num_tokens` tokens with this signature [L * E] send to
        each rank."""
        num_layers, num_experts, _ = self._share_LEK.shape
        signature_LE = signature.reshape(num_layers, num_experts)
        rows_LK = np.einsum("le,lek->lk", signature_LE, self._share_LEK)
        return np.asarray(num_tokens * rows_LK, dtype=np.float32)

    def place(
        self, slices: list[SequenceSlice], signatures: list[Floats], num_groups: int, spare: int
    ) -> list[list[SequenceSlice]]:
        """Groups the slices. A group is open to a slice while it has at most `spare` tokens more
        than the smallest."""
        groups: list[list[SequenceSlice]] = [[] for _ in range(num_groups)]
        sizes = np.zeros(num_groups, dtype=np.int64)
        loads_GLK = np.zeros((num_groups, *self._share_LEK.shape[::2]), dtype=np.float32)
        for index in sorted(range(len(slices)), key=lambda i: -len(slices[i].token_ids)):
            count = len(slices[index].token_ids)
            own_LK = self.of(signatures[index], count)
            is_open = sizes <= sizes.min() + spare
            busiest = (loads_GLK + own_LK).max(axis=2) - loads_GLK.max(axis=2)
            group = int(np.where(is_open, busiest.sum(axis=1), np.inf).argmin())
            groups[group].append(slices[index])
            loads_GLK[group] += own_LK
            sizes[group] += count
        return groups
