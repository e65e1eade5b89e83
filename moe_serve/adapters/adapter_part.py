"""The part of every adapter that a process holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from moe_serve.adapters.targets import AdaptedMatrix
from moe_serve.model.stage.tensor_shard import TensorShard


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPart:
    """The part of every adapter that a process holds."""

    has_attention: bool = True  # also shared experts, and the MLPs of dense layers
    shard: TensorShard = TensorShard(0, 1)  # of attention
    experts: Mapping[int, Collection[int]] | None = None  # by layer; None: all

    def wants(self, target: AdaptedMatrix) -> bool:
        """Returns True if the change to a matrix is held here."""
        if target.kind != "expert":
            return self.has_attention
        return self.experts is None or target.expert in self.experts.get(target.layer, ())


WHOLE = AdapterPart()
