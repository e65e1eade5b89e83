"""The loaded parts of the base model that adapters may share."""

from __future__ import annotations

from dataclasses import dataclass

from experts.expert_stage import ExpertStage
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.stage.gather import Gather


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """What this process has of the model; None: another process has it."""

    attention: AttentionStage | None = None
    gather: Gather | None = None  # of a tensor shard
    experts: ExpertStage | None = None
    is_routing: bool = False  # expert ranks route, not attention ranks
