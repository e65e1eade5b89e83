"""Names of ranks, as in `attention-0` and `expert-3`; every message and error uses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["attention", "expert"]


@dataclass(frozen=True, slots=True, order=True)
class RankName:
    """The pool of a rank, and its number there."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


def all_ranks(num_attention: int, num_experts: int) -> list[RankName]:
    """Returns the names of all ranks, attention ranks first."""
    return [
        *(RankName("attention", index) for index in range(num_attention)),
        *(RankName("expert", index) for index in range(num_experts)),
    ]
