"""Estimates how long answers will be, from the answers of the same tier so far.

An answer that becomes longer than its tier's limit counts as a runaway:

    limit = predicted_output_limit x P90 of the tier's recent answers

For the limit, answers that were cut off count as longer than they were (Kaplan and Meier's
estimate), and the P90 is taken a little higher, so that it holds for the next answer (split
conformal prediction). No answer has a limit while too few of its tier are known.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np

from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.service.near_steps import Survival

_NUM_RECENT = 256
_EVERY = 16  # answers between two computations of the quantile
_FIRST_GUESS = 256.0  # tokens, until answers are known
_LIMIT_LEVEL = 0.9
_LEAST_ENDED = 64  # recent answers that ended by themselves, before there is a limit


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


class OutputLimits:
    """Learns the length limit of each tier from its recent answers. It is infinite for a tier
    without a limit."""

    def __init__(self, tiers: Items[TierConfig]) -> None:
        self._factors = [tier.predicted_output_limit for tier in tiers]
        self._ends = [AnswerEnds() for _ in tiers]
        self._limits = [math.inf for _ in tiers]

    def of(self, tier: int) -> float:
        """Returns the tokens with which an answer that begins now is a runaway."""
        return self._limits[tier] if self._limits else math.inf

    def note(self, tier: int, length: int, *, is_complete: bool) -> None:
        """Learns from an answer that ended. One that was cut off was at least as long."""
        if not self._factors or (factor := self._factors[tier]) is None:
            return
        ends = self._ends[tier]
        if ends.note(length, is_complete=is_complete):
            limit = factor * _p90(ends)
            self._limits[tier] = limit if math.isinf(limit) else float(math.ceil(limit))

    def snapshot(self) -> tuple[float, ...]:
        """Returns the limits in the order of the tiers. Safe from any thread."""
        return tuple(self._limits)


def _p90(ends: AnswerEnds) -> float:
    """Returns the length that nine of ten answers do not exceed; infinite if too few are known."""
    survival = ends.survival
    num = len(survival.lengths)
    if ends.num_complete < _LEAST_ENDED:
        return math.inf
    within = np.flatnonzero(survival.shares <= 1 - _LIMIT_LEVEL * (num + 1) / num)
    return float(survival.lengths[within[0]]) if len(within) else math.inf
