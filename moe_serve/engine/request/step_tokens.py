"""How many tokens steps had: a histogram that a scheduler keeps and /metrics shows.

As in vLLM, a step has the prompt tokens that it computed and the tokens that it generated.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """`num_steps[i]` steps had more than BOUNDS[i - 1] and at most BOUNDS[i] tokens; the last entry
    is those beyond all bounds."""

    num_steps: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    num_tokens: int = 0

    def __add__(self, other: StepTokens) -> StepTokens:
        pairs = zip(self.num_steps, other.num_steps, strict=True)
        return StepTokens(
            num_steps=tuple(own + its for own, its in pairs),
            num_tokens=self.num_tokens + other.num_tokens,
        )


class StepTokenCounter:
    """Counts on the engine's thread; `snapshot` may be asked for on any."""

    def __init__(self) -> None:
        self._num_steps = [0] * (len(BOUNDS) + 1)
        self._num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """A step of so many tokens; of none is no step."""
        if num_tokens:
            self._num_steps[bisect.bisect_left(BOUNDS, num_tokens)] += 1
            self._num_tokens += num_tokens

    def count_to(self, total: int) -> None:
        """A step after which all steps together had `total` tokens."""
        self.count(total - self._num_tokens)

    def snapshot(self) -> StepTokens:
        return StepTokens(num_steps=tuple(self._num_steps), num_tokens=self._num_tokens)
