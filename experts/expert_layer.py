"""One layer's experts as the stage sees them, wherever their weights are.

T rows, K choices per row, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from torch import Tensor

from moe_kernels.interface.kernels import ExpertBank

MakeBank = Callable[[], ExpertBank]


class ExpertLayer(Protocol):
    """`LayerBanks` holds its experts' weights, a `MemoryLayer` has them read when they are due."""

    @property
    def held(self) -> frozenset[int]:
        """The experts that rows may be sent for."""
        ...

    def take(self, make_bank: MakeBank, experts: Collection[int]) -> None:
        """Take over experts that are not here yet; `make_bank` reads them, if that is due now."""
        ...

    def drop_added(self) -> None:
        """Give back what was taken over."""
        ...

    def own(self, experts: Collection[int]) -> None:
        """These are what the rank was given, from now on; what it took over is given back."""
        ...

    def total(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The rows' weighted sums [T, D], rounded to fp32."""
        ...

    def partial(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The sums [T, D] in fp64, over the choices that are here; -1 lives elsewhere."""
        ...
