"""Follows one sequence through its grammar and computes the tokens allowed next."""

from __future__ import annotations

import time
from collections import deque

import llguidance
import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.draft_counts import MAX_DRAFT

# CPU time that a sequence may spend on its grammar: a base, and an allowance per token.
MAX_FOLLOW_S, MAX_FOLLOW_TOKEN_S = 2.0, 0.05
_CHEAP_S = 0.001  # after masks up to this cost, forced tokens are looked for


class SequenceMatcher:
    """The grammar state of one sequence, kept with it by its sampler.

    It reads the answer's new tokens on each call, so it continues after a preemption and catches up
    on another rank. For a shorter answer it goes back.
    """

    __slots__ = ("_costs", "_matcher", "_num_read", "cpu_s")

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher, self._num_read = matcher, 0
        self.cpu_s = 0.0  # spent on the grammar so far, without what drafted tokens cost
        # lengths of the answer at the last masks, and their times
        self._costs: deque[tuple[int, float]] = deque(maxlen=2 * MAX_DRAFT)

    def go_back(self, num_tokens: int) -> None:
        """Forgets all but the answer's first `num_tokens` tokens; others may follow them."""
        if self._num_read > num_tokens:
            self._matcher.rollback(self._num_read - num_tokens)
            self._num_read = num_tokens
            while self._costs and self._costs[-1][0] > num_tokens:
                self.cpu_s -= self._costs.pop()[1]

    def fill(self, answer: list[int], bits_W: NDArray[np.uint32]) -> str | None:
        """Sets a bit for each token that may follow the answer. Returns the reason if no token
        may."""
        allowed_s = MAX_FOLLOW_S + MAX_FOLLOW_TOKEN_S * len(answer)
        if self.cpu_s > allowed_s:
            return (
                f"its grammar costs too much: {len(answer)} tokens took {self.cpu_s:.1f} s "
                f"of processor time, and {allowed_s:.1f} s are allowed; use a grammar that "
                "is less ambiguous"
            )
        clock = time.thread_time()
        try:
            return self._fill(answer, bits_W)
        finally:
            seconds = time.thread_time() - clock
            self.cpu_s += seconds
            self._costs.append((len(answer), seconds))

    def forced(self, answer: list[int], most: int) -> tuple[int, ...]:
        """Returns tokens that spell what the grammar forces after the answer, at most `most`. The
        model may spell it otherwise. Empty if nothing is forced, or the last mask was costly."""
        if self._costs and self._costs[-1][1] > _CHEAP_S:
            return ()
        self._read(answer)
        if self._matcher.is_error() or self._matcher.is_stopped():
            return ()
        return tuple(self._matcher.compute_ff_tokens()[:most])

    def _read(self, answer: list[int]) -> None:
        self.go_back(len(answer))
        self._matcher.consume_tokens(answer[self._num_read :])
        self._num_read = len(answer)

    def _fill(self, answer: list[int], bits_W: NDArray[np.uint32]) -> str | None:
        self._read(answer)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(bits_W.ctypes.data, bits_W.nbytes)
        if not self._matcher.is_error():
            return None if bits_W.any() else "its grammar allows no token here"
        why = self._matcher.get_error().partition("<state>")[0].split("\n")[0][:200]
        return f"its grammar cannot be followed further: {why}"
