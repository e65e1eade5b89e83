"""Compares an engine's steps with the best of others that took turns with it.

The best of several equal ones looks better than it is: which one is best is taken from one half of
the rounds, and compared in the other half.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.planning.measure import usual

Rounds = list[dict[str, list[float]]]  # of each round the seconds of steps, by engine
_NUM_RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """Relative: 0.05 is 5% slower. `low`, `high`: 95% of bootstrap samples of rounds."""

    share: float
    low: float
    high: float


def seconds_of(rounds: Rounds, name: str) -> float:
    """The usual step of an engine."""
    return usual([seconds for each in rounds for seconds in each[name]])


def behind_best(rounds: Rounds, name: str, others: Sequence[str]) -> Behind:
    """Needs two rounds; the interval is for the one that is best in all of them."""
    halves = (rounds[::2], rounds[1::2])
    assert all(halves), f"{len(rounds)} rounds cannot be halved"
    shares = [
        seconds_of(judged, name) / seconds_of(judged, _best(searched, others)) - 1
        for searched, judged in (halves, halves[::-1])
    ]
    best, draw = _best(rounds, others), random.Random(0)
    samples = []
    for _ in range(_NUM_RESAMPLES):
        sample = draw.choices(rounds, k=len(rounds))
        samples.append(seconds_of(sample, name) / seconds_of(sample, best) - 1)
    samples.sort()
    low, high = samples[_NUM_RESAMPLES * 25 // 1000], samples[_NUM_RESAMPLES * 975 // 1000 - 1]
    return Behind(share=sum(shares) / 2, low=low, high=high)


def _best(rounds: Rounds, names: Sequence[str]) -> str:
    return min(names, key=lambda name: seconds_of(rounds, name))
