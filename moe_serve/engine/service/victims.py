"""Chooses the running request that gives its pages or its seat back.

For pages, the one that costs least: (weight x seconds that it becomes later + seconds to compute it
again) per page that becomes free. For an urgent request when seats are full, only if

    the newcomer would be late without the seat, and is not late with it
    the victim keeps its own targets
    gain > 1.5 x cost, in weighted seconds
    the victim was preempted for an urgent request less than twice
    the victim has more tokens left than the newcomer needs steps
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moe_serve.engine.request.standing import MAX_URGENT_PREEMPTIONS

_LEAST_GAIN = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A running request as a possible victim. Infinite `slack_s`: it has no target left."""

    weight: float
    slack_s: float  # until its next deadline, beyond the time that it still needs
    again_s: float  # to compute it again
    num_pages: int  # that become free
    num_left: int  # tokens that it may still generate
    num_urgent_preemptions: int = 0

    def added_s(self, away_s: float) -> float:
        """Returns the seconds that it becomes later if it is away for `away_s` beyond `again_s`."""
        if math.isinf(self.slack_s):
            return 0.0
        delay_s = away_s + self.again_s
        return max(0.0, delay_s - max(0.0, self.slack_s))

    def cost(self, away_s: float) -> float:
        """Returns the weighted seconds that its preemption costs."""
        return self.weight * self.added_s(away_s) + self.again_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """The most urgent waiting request."""

    weight: float
    slack_s: float  # until the latest start that keeps its deadline
    num_steps: int  # until its first token


def cheapest(candidates: list[Candidate], away_s: float) -> int:
    """Returns the index of the request that gives its pages back; of equal ones, the one that
    started last.
    """
    costs = [each.cost(away_s) / max(1, each.num_pages) for each in candidates]
    return min(range(len(costs)), key=lambda index: (costs[index], -index))


def for_urgent(
    newcomer: Newcomer, candidates: Iterable[tuple[int, Candidate]], seat_s: float
) -> int | None:
    """Returns the key of the request that gives its seat to a newcomer, which would otherwise wait
    `seat_s` for one; None if no request should.
    """
    if newcomer.slack_s < 0.0 or newcomer.slack_s >= seat_s:
        return None  # late anyway, or in time anyway
    gain = newcomer.weight * (seat_s - newcomer.slack_s)
    best: tuple[float, int] | None = None
    for key, each in candidates:
        if each.num_urgent_preemptions >= MAX_URGENT_PREEMPTIONS:
            continue
        if each.num_left <= newcomer.num_steps or each.added_s(seat_s) > 0.0:
            continue
        cost = each.cost(seat_s)
        if gain > _LEAST_GAIN * cost and (best is None or cost <= best[0]):
            best = cost, key
    return None if best is None else best[1]
