"""Sends rows to the expert stage and returns their sums.

`dispatch` returns at once if it can; `combine` waits. Between the two calls the caller runs the
other micro-batches' attention: that is the ping-pong.

T rows, K choices of the router, N choices that are kept, E experts, D model width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from experts.expert_layer import ExpertLayer
from experts.expert_stage import ExpertStage, RoutedRows
from moe_serve.model.stage.adapter_rows import RowGroup
from moe_serve.model.stage.attention_stage import Routed
from moe_serve.pipeline.frames.wire import WireFormat, as_received


class Transport(Protocol):
    """The connection of one attention rank to the experts."""

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        """Sends a micro-batch's rows of one layer. At most one is in flight per micro-batch."""
        ...

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        """Waits -> the weighted sum of the rows' experts, [T, D] in fp32,
        in the order dispatched.
        """
        ...

    def finish(self) -> None:
        """Makes the checks that are only possible once all rows of a step are back.

        Before this call a GPU may still wait for another rank; afterwards it does not.
        """
        ...

    def reset(self) -> None:
        """Forgets the exchanges that were in flight when a step failed."""
        ...


class LocalTransport:
    """Runs both stages in one process: dispatch is a function call.

    With a `wire`, rows are rounded as if they had been sent (cluster.wire_dtype).
    """

    def __init__(self, stage: ExpertStage, wire: WireFormat | None = None) -> None:
        self._stage, self._wire = stage, wire
        self._results: dict[int, Tensor] = {}

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        assert micro_batch not in self._results, f"micro-batch {micro_batch} is still in flight"
        rows, x_TD = routed.rows, routed.rows.x_TD
        if self._wire is not None:
            x_TD = as_received(self._wire, x_TD)
        self._stage.foresee(layer, micro_batch, routed.foreseen_E)
        experts = self._stage.layer(layer)
        if routed.adapted:
            sums_TD = _adapted_total(experts, replace(rows, x_TD=x_TD), routed)
        else:
            sums_TD = experts.total(x_TD, rows.expert_ids_TK, rows.weights_TK)
        self._results[micro_batch] = sums_TD

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        return self._results.pop(micro_batch)

    def finish(self) -> None:
        """Does nothing."""

    def reset(self) -> None:
        self._results.clear()


def _adapted_total(experts: ExpertLayer, rows: RoutedRows, routed: Routed) -> Tensor:
    """Returns the rows' sums [T, D] in fp32, where adapters have experts in place of others, or add
    to them.

    Sums over banks are exact and rounded once (moe_kernels), so a row has the bits of a checkpoint
    that contains the adapter's experts.
    """
    base_TK, parts = rows.expert_ids_TK.clone(), list[tuple[RowGroup, Tensor]]()
    for each in routed.adapted:
        group, bank = each.group, each.experts.bank
        if bank is None:
            assert each.experts.additions is not None, "the experts of an adapter are on ranks"
            continue
        ids_RK = group.select(rows.expert_ids_TK)
        is_own_RK = each.experts.is_own_E[ids_RK]
        x_RD, weights_RK = group.select(rows.x_TD), group.select(rows.weights_TK)
        own_RK = torch.where(is_own_RK, ids_RK, -1)
        parts.append((group, bank.partial(x_RD, own_RK, weights_RK)))
        base_TK = group.put(base_TK, torch.where(is_own_RK, -1, ids_RK))
    sum_TD = experts.partial(rows.x_TD, base_TK, rows.weights_TK, routed.additions)
    for group, part_RD in parts:
        sum_TD = group.put(sum_TD, group.select(sum_TD) + part_RD)
    return sum_TD.float()


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
