"""Names of ranks: `attention-0`, `expert-3`. They say who is meant in every message and error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["attention", "expert"]


@dataclass(frozen=True, slots=True, order=True)
class RankName:
    """Which of the two pools, and its number there."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


def all_ranks(num_attention: int, num_experts: int) -> list[RankName]:
    """Attention ranks first."""
    return [
        *(RankName("attention", index) for index in range(num_attention)),
        *(RankName("expert", index) for index in range(num_experts)),
    ]
