"""Predicts for each tier how long an answer may become before it counts as a runaway.

    limit = predicted_output_limit x P90 of the tier's recent answers

Answers that were cut off count as longer than they were (Kaplan and Meier's estimate), and the P90
is taken a little higher, so that it holds for the next answer (split conformal prediction). No
answer has a limit while too few of its tier are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moe_serve.config.tiers import TierConfig
from moe_serve.engine.service.lengths.answer_lengths import AnswerEnds

_LEVEL = 0.9
_LEAST_ENDED = 64  # recent answers that ended by themselves, before there is a limit


class OutputLimits:
    """Learns the length limit of each tier from its recent answers. It is infinite for a tier
    without a limit."""

    def __init__(self, tiers: Sequence[TierConfig]) -> None:
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
    within = np.flatnonzero(survival.shares <= 1 - _LEVEL * (num + 1) / num)
    return float(survival.lengths[within[0]]) if len(within) else math.inf
