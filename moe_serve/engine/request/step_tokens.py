"""A histogram of the tokens per step, kept by a scheduler and shown in /metrics.

As in vLLM, a step's tokens are the prompt tokens it computed and the tokens it generated.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """A snapshot: `num_steps[i]` steps had more than BOUNDS[i - 1] and at most BOUNDS[i] tokens.

    The last entry counts steps beyond all bounds.
    """

    num_steps: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    num_tokens: int = 0

    def __add__(self, other: StepTokens) -> StepTokens:
        pairs = zip(self.num_steps, other.num_steps, strict=True)
        return StepTokens(
            num_steps=tuple(own + its for own, its in pairs),
            num_tokens=self.num_tokens + other.num_tokens,
        )


class StepTokenCounter:
    """Counts on the engine's thread. `snapshot` is safe from any thread."""

    def __init__(self) -> None:
        self._num_steps = [0] * (len(BOUNDS) + 1)
        self._num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """Counts a step of `num_tokens` tokens. A step without tokens is not counted."""
        if num_tokens:
            self._num_steps[bisect.bisect_left(BOUNDS, num_tokens)] += 1
            self._num_tokens += num_tokens

    def count_to(self, total: int) -> None:
        """Counts a step after which all steps together had `total` tokens."""
        self.count(total - self._num_tokens)

    def snapshot(self) -> StepTokens:
        return StepTokens(num_steps=tuple(self._num_steps), num_tokens=self._num_tokens)
