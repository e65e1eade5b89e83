"""Predicts the next steps of an engine one by one, until a newcomer's prompt is read.

    step       1     2     3     4
    ahead    960   960   300     -      prompt tokens that go first
    newcomer   -     -   660   340      it starts where these end, once a seat is free
                                 ^      and its first token comes at the end of this step

Most waits take a few steps. A rate would be wrong by half a step or more for them, because a new
request waits for the end of the step under way, and a prompt is never read in a part of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MOST_STEPS = 64  # beyond that only the rates count
# Steps from now at which the ends of answers are counted: 0 is the end of the step under way.
_GRID = np.unique(np.concatenate([np.arange(17.0), np.round(np.geomspace(16.0, 4096.0, 28))]))


@dataclass(frozen=True, slots=True)
class Survival:
    """The share of the answers that are longer than each of some lengths, which grow."""

    lengths: Floats
    shares: Floats

    def at(self, lengths: Floats) -> Floats:
        places = np.searchsorted(self.lengths, lengths, side="right")
        return np.asarray(np.concatenate([[1.0], self.shares])[places])


@dataclass(frozen=True, slots=True)
class Remaining:
    """The answers that are being generated: their tokens so far, and how many each may have."""

    num_tokens: Floats
    most_tokens: Floats
    survival: Survival

    def after(self, num_steps: int) -> Remaining:
        """Returns the same answers some steps later."""
        return Remaining(self.num_tokens + num_steps, self.most_tokens, self.survival)

    def steps_until(self, num_ends: float, arriving: float) -> float:
        """Returns the steps until so many more answers have probably ended than requests came that
        go first, `arriving` in a step; infinite if they are too few."""
        if not len(self.num_tokens):
            return math.inf
        after = self.num_tokens[:, None] + _GRID[None, :]
        goes_on = (
            self.survival.at(after) / np.maximum(1e-9, self.survival.at(self.num_tokens))[:, None]
        )
        ended = np.where(after >= self.most_tokens[:, None], 1.0, 1.0 - goes_on).sum(axis=0)
        ended = ended - arriving * _GRID
        enough = np.flatnonzero(ended >= num_ends)
        if not len(enough):
            return math.inf
        place = int(enough[0])
        if not place:
            return 0.0
        low, high = ended[place - 1], ended[place]
        share = (num_ends - low) / (high - low)
        return float(_GRID[place - 1] + share * (_GRID[place] - _GRID[place - 1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class NearSteps:
    """The engine as the next steps find it: what a step costs, and what it may read."""

    step_s: float  # seconds of a step that reads nothing
    more_s: float  # seconds that one more prompt token adds
    budget: float  # prompt tokens of a step

    @property
    def most_tokens(self) -> float:
        """Prompt tokens that all of these steps can read."""
        return MOST_STEPS * max(1.0, self.budget)

    def first_token_s(
        self, ahead: float, own: float, behind: float, first: float, arriving_per_s: float
    ) -> float | None:
        """Returns the seconds to the end of the step that reads the last of `own` tokens; None if
        it is too far. `ahead` go first and `behind` after it; it has no seat before the step
        `first`. `arriving_per_s`: tokens of later requests that go first."""
        now, budget = 0.0, max(1.0, self.budget)
        for step in range(MOST_STEPS):
            before, mine = min(budget, ahead), 0.0
            ahead, left = ahead - before, budget - before
            if ahead <= 0.0 and step >= first - 0.5:
                mine = min(left, own)
                own, left = own - mine, left - mine
            last = min(left, behind)
            behind -= last
            seconds = self.step_s + self.more_s * (before + mine + last)
            now += seconds
            if own <= 0.0:
                return now
            ahead += arriving_per_s * seconds
        return None
