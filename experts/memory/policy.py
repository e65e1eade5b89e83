"""What an expert memory evicts, and whether it reads ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MemoryPolicyName = Literal["lru", "frequency", "prefetch", "predicted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicy:
    """Each name adds to the one before."""

    is_lru: bool  # evict what was used last, longest ago; else what is expected last
    is_prefetching: bool  # read what is expected before it is needed
    is_predicting: bool  # expect by the rows at hand, not by frequencies alone

    @classmethod
    def named(cls, name: MemoryPolicyName) -> MemoryPolicy:
        return cls(
            is_lru=name == "lru",
            is_prefetching=name in ("prefetch", "predicted"),
            is_predicting=name == "predicted",
        )
