"""Estimates how long answers will be, from the answers of the same tier so far."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from moe_serve.engine.request.sequence import Sequence

_NUM_RECENT = 256
_EVERY = 16  # answers between two computations of the quantile
_FIRST_GUESS = 256.0  # tokens, until answers are known


class AnswerLengths(Protocol):
    """Estimates of the number of tokens of an answer."""

    def p90(self, sequence: Sequence, tier: int) -> float:
        """Returns the tokens that nine of ten such answers do not exceed."""
        ...

    def note(self, sequence: Sequence, tier: int, *, is_complete: bool) -> None:
        """Learns from an answer that ended. One that was cut off was at least as long."""
        ...


class TierLengths:
    """Implements AnswerLengths by the quantile of the tier's recent answers. An answer that was cut
    off counts with its length only if that is above the estimate."""

    def __init__(self, num_tiers: int) -> None:
        self._recent: list[deque[int]] = [deque(maxlen=_NUM_RECENT) for _ in range(num_tiers)]
        self._p90 = [_FIRST_GUESS for _ in range(num_tiers)]
        self._num_noted = [0 for _ in range(num_tiers)]

    def p90(self, sequence: Sequence, tier: int) -> float:
        """See `AnswerLengths.p90`. Never more than the request allows."""
        most = sequence.rules.max_tokens
        return self._p90[tier] if most is None else min(self._p90[tier], float(most))

    def note(self, sequence: Sequence, tier: int, *, is_complete: bool) -> None:
        """See `AnswerLengths.note`."""
        length = sequence.num_output_tokens
        if not is_complete and length <= self._p90[tier]:
            return
        self._recent[tier].append(length)
        self._num_noted[tier] += 1
        if len(self._recent[tier]) < _EVERY or self._num_noted[tier] % _EVERY == 0:
            self._p90[tier] = float(np.quantile(np.array(self._recent[tier]), 0.9))
