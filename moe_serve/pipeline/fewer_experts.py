"""Runs only the strongest experts of each row, to draft tokens with the served model itself.

T rows, K choices of the router, N choices that are kept, E experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from experts.expert_stage import ExpertStage, RoutedRows
from moe_serve.model.stage.attention_stage import Routed
from moe_serve.pipeline.transport import LocalTransport


class FewerExperts(LocalTransport):
    """A transport to the experts of this process that leaves out the weaker ones.

    If an expert memory holds a part of the experts, rows take those that are resident, and nothing
    is read. A row without any gets nothing from the layer.
    """

    def __init__(self, stage: ExpertStage, num_experts: int) -> None:
        """`num_experts` are kept of each row."""
        super().__init__(stage)
        self._memory, self._num_experts = stage.memory, num_experts

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        """See `Transport.dispatch`."""
        resident_E = None
        if self._memory is not None:
            resident_E = torch.from_numpy(self._memory.resident(layer))
        rows = strongest(routed.rows, self._num_experts, resident_E)
        super().dispatch(layer, micro_batch, replace(routed, rows=rows))


def strongest(rows: RoutedRows, num: int, resident_E: Tensor | None = None) -> RoutedRows:
    """Returns the rows with their `num` choices of the largest weights, scaled to the sum of all K.

    Only experts marked in `resident_E` are taken; a choice that is missing becomes -1.

    Example, num 2: experts [1, 4, 7], weights [0.2, 0.5, 0.3] -> [4, 7], [0.625, 0.375].
    """
    ids_TK, weights_TK = rows.expert_ids_TK, rows.weights_TK
    known_TK = weights_TK
    if resident_E is not None:
        known_TK = torch.where(resident_E.to(ids_TK.device)[ids_TK], weights_TK, 0.0)
    places_TN = known_TK.topk(min(num, ids_TK.shape[1]), dim=-1).indices.sort(dim=-1).values
    kept_TN = known_TK.gather(1, places_TN)
    total_T1 = kept_TN.sum(dim=-1, keepdim=True)
    scale_T1 = weights_TK.sum(dim=-1, keepdim=True) / total_T1.clamp(min=1e-9)
    ids_TN = torch.where(kept_TN > 0.0, ids_TK.gather(1, places_TN), -1)
    return RoutedRows(rows.x_TD, ids_TN, kept_TN * scale_T1)
