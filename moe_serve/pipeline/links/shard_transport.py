"""Shares the experts' sums inside an attention rank: the first shard receives them and sends them
on.

T rows, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.model.stage.attention_stage import Routed
from moe_serve.pipeline.links.shard_group import ShardGroup
from moe_serve.pipeline.transport import Transport


class LeaderTransport:
    """Implements Transport for the first shard: it forwards another transport's sums."""

    def __init__(self, transport: Transport, group: ShardGroup) -> None:
        self._transport, self._group = transport, group

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        self._transport.dispatch(layer, micro_batch, routed)

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        out_TD = self._transport.combine(layer, micro_batch)
        self._group.share(out_TD)
        return out_TD

    def finish(self) -> None:
        self._transport.finish()

    def reset(self) -> None:
        self._transport.reset()


class FollowerTransport:
    """Implements Transport for the other shards: they send no rows and receive the sums."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self._shapes: dict[int, torch.Size] = {}  # by micro-batch

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        self._shapes[micro_batch] = routed.x_TD.shape

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        """Raises StepAbandonedError."""
        return self._group.shared(self._shapes.pop(micro_batch), torch.float32)

    def finish(self) -> None:
        """Do nothing: the first shard finishes the step."""

    def reset(self) -> None:
        self._shapes.clear()
