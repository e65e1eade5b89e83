"""Estimates how long answers will be, from the answers of the same tier so far."""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

import numpy as np

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.service.near_steps import Survival

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


class AnswerEnds:
    """Learns at which lengths answers end. One that was cut off tells only that it was longer
    (Kaplan and Meier's estimate)."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, bool]] = deque(maxlen=2 * _NUM_RECENT)
        self._num_noted = 0
        self.num_complete = 0  # of the answers in `survival`, those that were not cut off
        self.survival = Survival(np.zeros(0), np.zeros(0))

    def most_tokens(self, sequence: Sequence) -> float:
        """Returns how many tokens an answer may have."""
        most = sequence.rules.max_tokens
        return math.inf if most is None else float(most)

    def note(self, length: int, *, is_complete: bool) -> bool:
        """Learns from an answer that ended. Returns whether `survival` is new."""
        self._recent.append((length, is_complete))
        self._num_noted += 1
        if self._num_noted % _EVERY:
            return False
        table = np.array(sorted(self._recent), dtype=np.float64)
        at_risk = np.arange(len(table), 0, -1)
        shares = np.cumprod(1.0 - table[:, 1] / at_risk)
        self.survival = Survival(table[:, 0], np.asarray(shares, dtype=np.float64))
        self.num_complete = int(table[:, 1].sum())
        return True
