"""Counts the reasoning tokens of a chat's answers, for `usage...reasoning_tokens`."""

from __future__ import annotations

from collections.abc import Sequence

from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from moe_serve.engine.request.thought_counter import ThoughtCounter

_NO_BUDGET = 2**62


class ReasoningTokens:
    """Counts the tokens between the markers, as a thinking budget does.

    The count depends on the tokens alone, not on how they are grouped into pieces. It is the same
    whether the answer shows the reasoning, hides it, or keeps it in the content.
    """

    def __init__(self, markers: ThinkingMarkers | None, num_choices: int) -> None:
        """`markers` None: the answers have no reasoning."""
        self._counters: list[ThoughtCounter] = []
        self._tokens: list[list[int]] = []
        if markers is not None:
            self._counters = [ThoughtCounter(markers, _NO_BUDGET, 0) for _ in range(num_choices)]
            self._tokens = [[] for _ in range(num_choices)]

    @property
    def total(self) -> int:
        """The reasoning tokens of all choices so far."""
        return sum(counter.num_spent for counter in self._counters)

    def read(self, index: int, token_ids: Sequence[int]) -> None:
        """Adds the new tokens of one choice."""
        if not self._counters or self._counters[index].is_over:
            return
        self._tokens[index] += token_ids
        self._counters[index].read(self._tokens[index])
