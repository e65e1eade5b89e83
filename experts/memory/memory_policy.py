"""Policies of an expert memory: which experts it evicts, and whether it reads ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MemoryPolicyName = Literal["lru", "frequency", "prefetch", "predicted", "next-layer"]


_CONFIDENT = 0.5
# Of the absent experts predicted with probability 0.5 or more, four in five are needed; with 0.7 or
# more, nine in ten, at nearly the same hit rate (docs/internals/expert-memory.md).
_CONFIDENT_AHEAD = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicy:
    """The switches of a policy. Each name adds to the one before; the last two predict in different
    ways."""

    is_lru: bool  # evict the least recently used expert; otherwise the one that is expected last
    is_prefetching: bool  # read expected experts before they are needed
    is_predicting: bool  # predict from the rows of a visit, with statistics learnt while serving
    is_foreseeing: bool  # take predictions from a trained predictor
    confidence: float  # smallest probability for which a read ahead may evict another expert

    @classmethod
    def named(cls, name: MemoryPolicyName) -> MemoryPolicy:
        return cls(
            is_lru=name == "lru",
            is_prefetching=name in ("prefetch", "predicted", "next-layer"),
            is_predicting=name == "predicted",
            is_foreseeing=name == "next-layer",
            confidence=_CONFIDENT_AHEAD if name == "next-layer" else _CONFIDENT,
        )
