"""The expert stage with a recording for every layer and number of rows.

T rows, D model width, K choices per row.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from experts.expert_stage import ExpertStage
from experts.routed_rows import RoutedRows
from moe_kernels.graphs.graph_recorder import Recorder
from moe_kernels.graphs.row_graphs import RowFunction, RowGraphs


class GraphedExpertStage:
    """As `ExpertStage`, to its callers: numbers of rows that are not recorded go there.

    Padding repeats the first row, so it loads no more experts than the rows do.
    """

    def __init__(
        self,
        stage: ExpertStage,
        recorder: Recorder,
        buckets: Sequence[int],
        *,
        width: int,
        top_k: int,
        dtype: torch.dtype,
        device: torch.device,
        local_expert: int = 0,
    ) -> None:
        """Record, with rows of zeros that choose `local_expert`, which must be here."""
        self._stage = stage
        most = max(buckets)
        with torch.inference_mode():
            inputs = (
                torch.zeros(most, width, dtype=dtype, device=device),
                torch.full((most, top_k), local_expert, dtype=torch.int64, device=device),
                torch.zeros(most, top_k, device=device),
            )
            out_BD = torch.zeros(most, width, device=device)
            functions: dict[Hashable, RowFunction] = {
                layer: _run(stage, layer) for layer in stage.sparse_layers
            }
            self._graphs = RowGraphs(functions, buckets, inputs, out_BD, recorder)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        return self._stage.sparse_layers

    def foresee(self, layer: int, micro_batch: int, following_E: Tensor | None) -> None:
        """See `ExpertStage`."""
        self._stage.foresee(layer, micro_batch, following_E)

    def run(self, layer: int, rows: RoutedRows) -> Tensor:
        """-> the rows' weighted expert outputs, [T, D] in fp32."""
        out_TD = self._graphs.run(layer, rows.x_TD, rows.expert_ids_TK, rows.weights_TK)
        return self._stage.run(layer, rows) if out_TD is None else out_TD


def _run(stage: ExpertStage, layer: int) -> RowFunction:
    return lambda x_TD, ids_TK, weights_TK: stage.run(layer, RoutedRows(x_TD, ids_TK, weights_TK))
