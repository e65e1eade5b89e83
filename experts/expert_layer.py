"""The interface of one layer's experts that the expert stage uses, wherever their weights are
stored.

T rows, K choices per row, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from torch import Tensor

from moe_kernels.interface.kernels import ExpertBank

MakeBank = Callable[[], ExpertBank]


class ExpertLayer(Protocol):
    """The experts of one layer. `LayerBanks` holds their weights; `MemoryLayer` loads them when
    rows need them."""

    @property
    def held(self) -> frozenset[int]:
        """The experts that may receive rows."""
        ...

    def take(self, make_bank: MakeBank, experts: Collection[int]) -> None:
        """Take over experts that are not held yet. `make_bank` reads their weights, if this layer
        reads them right away."""
        ...

    def drop_added(self) -> None:
        """Release the experts that were taken over."""
        ...

    def own(self, experts: Collection[int]) -> None:
        """Replace the experts this rank owns by these, and release the experts that it took
        over."""
        ...

    def total(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the rows' weighted sums [T, D], rounded to fp32."""
        ...

    def partial(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the sums [T, D] in fp64 over the experts held here; id -1 marks a choice held
        elsewhere."""
        ...
