"""The experts of one layer when an expert memory stores them, resident or not.

T rows, K choices per row, D model width.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from experts.expert_layer import MakeBank, partial_sums
from experts.memory.expert_memory import ExpertMemory
from moe_kernels.interface.adapters import RowAdditions


class MemoryLayer:
    """Implements ExpertLayer with the experts of a memory, in as many passes as necessary.

    Sums over passes are exact (moe_kernels), so the number of passes changes no bit of the output.
    """

    def __init__(self, memory: ExpertMemory, layer: int, experts: Collection[int]) -> None:
        self._memory, self._layer, self._bank = memory, layer, memory.banks[layer]
        self._own = self.held = frozenset(experts)
        memory.hold(layer, sorted(self._own))

    @property
    def whole_bank(self) -> None:
        """None: experts come and go."""

    @property
    def only_bank(self) -> None:
        """None: experts come and go."""

    def take(self, make_bank: MakeBank, experts: Collection[int]) -> None:
        """Takes over experts; they are read when needed and share the budget."""
        more = frozenset(experts)
        assert more and not more & self.held, f"experts {sorted(more & self.held)} are held already"
        self._memory.hold(self._layer, sorted(more))
        self.held |= more

    def drop_added(self) -> None:
        self._memory.hold(self._layer, sorted(self.held - self._own), is_held=False)
        self.held = self._own

    def own(self, experts: Collection[int]) -> None:
        """Replaces the rank's own experts; new ones are read when needed."""
        own = frozenset(experts)
        self._memory.hold(self._layer, sorted(self.held - own), is_held=False)
        self._memory.hold(self._layer, sorted(own))
        self._own = self.held = own

    def total(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._sum(x_TD, expert_ids_TK, weights_TK, is_whole=True)

    def partial(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        additions: RowAdditions | None = None,
    ) -> Tensor:
        return self._sum(x_TD, expert_ids_TK, weights_TK, additions, is_whole=False)

    def _sum(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        additions: RowAdditions | None = None,
        *,
        is_whole: bool,
    ) -> Tensor:
        sum_TD: Tensor | None = None
        for each in self._memory.visit(self._layer, expert_ids_TK):
            if each.is_all and is_whole:
                sum_TD = self._bank(x_TD, each.expert_ids_TK, weights_TK)
                continue
            part_TD = partial_sums(self._bank, x_TD, each.expert_ids_TK, weights_TK, additions)
            sum_TD = part_TD if sum_TD is None else sum_TD.add_(part_TD)
        assert sum_TD is not None, "a visit yields at least one pass"
        return sum_TD.float() if is_whole else sum_TD
