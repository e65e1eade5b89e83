"""The part of every adapter that a process holds, and the parts of the base model beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from moe_serve.adapters.targets import AdaptedMatrix
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.stage.gather import Gather
from moe_serve.model.stage.tensor_shard import TensorShard


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPart:
    """The part of every adapter that a process holds, and the parts of the base model beside it."""

    has_attention: bool = True  # also shared experts, and the MLPs of dense layers
    shard: TensorShard = TensorShard(0, 1)  # of attention
    experts: Mapping[int, Collection[int]] | None = None  # by layer; None: all

    def wants(self, target: AdaptedMatrix) -> bool:
        """Returns True if the change to a matrix is held here."""
        if target.kind != "expert":
            return self.has_attention
        return self.experts is None or target.expert in self.experts.get(target.layer, ())


WHOLE = AdapterPart()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """The parts of the model that this process has; None: another process has it."""

    attention: AttentionStage | None = None
    gather: Gather | None = None  # of a tensor shard
    is_routing: bool = False  # expert ranks route, not attention ranks
