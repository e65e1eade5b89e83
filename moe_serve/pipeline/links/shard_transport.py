"""The experts' sums inside an attention rank: its first shard gets them, and shares them.

T rows, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.model.stage.attention_stage import Routed
from moe_serve.pipeline.links.shard_group import ShardGroup
from moe_serve.pipeline.transport import Transport


class LeaderTransport:
    """Implements Transport for the first shard: another transport, whose sums the others get."""

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
    """Implements Transport for the other shards: they send nothing, and get the sums."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self._shapes: dict[int, torch.Size] = {}  # by micro-batch

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        self._shapes[micro_batch] = routed.x_TD.shape

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        """Raises StepAbandonedError."""
        return self._group.shared(self._shapes.pop(micro_batch), torch.float32)

    def finish(self) -> None:
        """The first shard does."""

    def reset(self) -> None:
        self._shapes.clear()
