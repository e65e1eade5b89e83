"""How many tokens a micro-batch may have: about what the balanced split gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """Tokens of each group, inclusive."""

    low: int
    high: int

    @staticmethod
    def near(balanced_sizes: Sequence[int], tolerance: float) -> SizeLimits:
        """Within `tolerance` of the smallest and the largest group of a balanced split; none is
        ever empty."""
        low, high = min(balanced_sizes), max(balanced_sizes)
        assert low >= 1, f"a balanced split has groups of {list(balanced_sizes)} tokens"
        return SizeLimits(max(1, low - int(low * tolerance)), high + int(high * tolerance))

    def allow(self, smaller: int, larger: int) -> bool:
        """Whether a group that has shrunk and one that has grown are within the limits."""
        return smaller >= self.low and larger <= self.high
