"""What an expert memory evicts, and whether it reads ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MemoryPolicyName = Literal["lru", "frequency", "prefetch", "predicted", "next-layer"]


_CONFIDENT = 0.5
# Of absent experts that are foreseen with 0.5 and more four in five come, with 0.7 and more nine in
# ten, and hits are nearly the same (docs/internals/expert-memory.md).
_CONFIDENT_AHEAD = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicy:
    """Each name adds to the one before; the last two predict in two ways."""

    is_lru: bool  # evict what was used last, longest ago; else what is expected last
    is_prefetching: bool  # read what is expected before it is needed
    is_predicting: bool  # expect by the rows at hand, not by frequencies alone: learn from them
    is_foreseeing: bool  # the same, and somebody else knows (a trained predictor)
    confidence: float  # the least probability for which something else is evicted ahead of time

    @classmethod
    def named(cls, name: MemoryPolicyName) -> MemoryPolicy:
        return cls(
            is_lru=name == "lru",
            is_prefetching=name in ("prefetch", "predicted", "next-layer"),
            is_predicting=name == "predicted",
            is_foreseeing=name == "next-layer",
            confidence=_CONFIDENT_AHEAD if name == "next-layer" else _CONFIDENT,
        )
