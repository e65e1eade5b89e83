"""One sequence's way through its grammar: what may come next, after the answer so far."""

from __future__ import annotations

import time

import llguidance
import numpy as np
from numpy.typing import NDArray

# A sequence may spend this much of the processor on its grammar, and so much more for each token.
MAX_FOLLOW_S, MAX_FOLLOW_TOKEN_S = 2.0, 0.05


class SequenceMatcher:
    """Kept with a sequence by whoever samples it. It reads the answer's tokens when it is asked:
    after a preemption it goes on, and on another rank it catches up."""

    __slots__ = ("_matcher", "_num_read", "cpu_s")

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher, self._num_read = matcher, 0
        self.cpu_s = 0.0  # that the grammar has taken so far

    def fill(self, answer: list[int], bits_W: NDArray[np.uint32]) -> str | None:
        """Set a bit for each token that may follow the answer; or say why none can."""
        allowed_s = MAX_FOLLOW_S + MAX_FOLLOW_TOKEN_S * len(answer)
        if self.cpu_s > allowed_s:
            return (
                f"its grammar costs too much: {len(answer)} tokens took {self.cpu_s:.1f} s of the "
                f"processor, {allowed_s:.1f} s are allowed; use a grammar that is less ambiguous"
            )
        clock = time.thread_time()
        try:
            return self._fill(answer, bits_W)
        finally:
            self.cpu_s += time.thread_time() - clock

    def _fill(self, answer: list[int], bits_W: NDArray[np.uint32]) -> str | None:
        self._matcher.consume_tokens(answer[self._num_read :])
        self._num_read = len(answer)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(bits_W.ctypes.data, bits_W.nbytes)
        if not self._matcher.is_error():
            return None if bits_W.any() else "its grammar allows no token here"
        why = self._matcher.get_error().partition("<state>")[0].split("\n")[0][:200]
        return f"its grammar cannot be followed further: {why}"
