"""The expert stage of a model: all layers' experts that live here, and nothing between layers.

Knows nothing of attention, of requests, or of where its rows come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from experts.routed_rows import RoutedRows
from moe_kernels.kernels import ExpertBank


class ExpertStage:
    """`run(layer, rows)` -> the rows' weighted expert outputs, [T, D] in fp32."""

    def __init__(self, banks: Sequence[ExpertBank | None]) -> None:
        self._banks = tuple(banks)  # by layer; None: a dense layer

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers that have routed experts."""
        return tuple(layer for layer, bank in enumerate(self._banks) if bank is not None)

    def run(self, layer: int, rows: RoutedRows) -> Tensor:
        bank = self._banks[layer]
        assert bank is not None, f"rows were sent for layer {layer}, which has no routed experts"
        return bank(rows.x_TD, rows.expert_ids_TK, rows.weights_TK)

    def partial(
        self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """The same sums in fp64; choices with id -1 live elsewhere and add nothing."""
        bank = self._banks[layer]
        assert bank is not None, f"rows were sent for layer {layer}, which has no routed experts"
        return bank.partial(x_TD, expert_ids_TK, weights_TK)
