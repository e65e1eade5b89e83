"""The expert stage of a model: all layers' experts that live here, and nothing between layers.

Knows nothing of attention, of requests, or of where its rows come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from experts.routed_rows import RoutedRows
from moe_kernels.expert_mlp import ExpertMLP, routed_experts


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One layer's experts by global id; None where an expert lives elsewhere."""

    experts: tuple[ExpertMLP | None, ...]


class ExpertStage:
    """`run(layer, rows)` -> the rows' weighted expert outputs, [T, D] in fp32."""

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._layers = tuple(layers)

    def run(self, layer: int, rows: RoutedRows) -> Tensor:
        experts = self._layers[layer].experts
        return routed_experts(rows.x_TD, rows.expert_ids_TK, rows.weights_TK, experts)
