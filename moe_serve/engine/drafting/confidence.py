"""Learns how often a network's guesses are right, for each probability that the network gives
them.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

_NUM_BUCKETS = 10  # of confidences from 0 to 100 per cent
_PRIOR_TRIES = 4.0  # weight of the network's own confidence
_MAX_TRIES = 256.0  # at this count all counts are halved, so that they follow a change
_MOST = 0.98  # the highest rate, also before any guess was verified


class ConfidenceRates:
    """Counts tried and accepted guesses by confidence, regardless of their place in a draft.

    This corrects the confidences of a network that is too sure, or that guesses for sampled text.
    """

    __slots__ = ("_accepted", "_rates", "_tried")

    def __init__(self) -> None:
        middles = [min((bucket + 0.5) / _NUM_BUCKETS, _MOST) for bucket in range(_NUM_BUCKETS)]
        self._rates = middles
        self._tried = [_PRIOR_TRIES] * _NUM_BUCKETS
        self._accepted = [_PRIOR_TRIES * middle for middle in middles]

    def survivals(self, confidences: Items[int], factor: float) -> list[float]:
        """Returns for each guess the probability that it and all before it are accepted.
        `factor`: the luck of the request."""
        found, survival, rates = list[float](), factor, self._rates
        for confidence in confidences:
            survival *= rates[_bucket(confidence)]
            found.append(min(survival, _MOST))
        return found

    def note(self, confidences: Items[int], num_accepted: int) -> None:
        """Counts a verified draft, whose first `num_accepted` guesses were right."""
        for place, confidence in enumerate(confidences[: num_accepted + 1]):
            bucket = _bucket(confidence)
            self._tried[bucket] += 1.0
            if place < num_accepted:
                self._accepted[bucket] += 1.0
            if self._tried[bucket] > _MAX_TRIES:
                self._tried[bucket] /= 2
                self._accepted[bucket] /= 2
            self._rates[bucket] = self._accepted[bucket] / self._tried[bucket]


def _bucket(confidence: int) -> int:
    return min(max(confidence, 0) * _NUM_BUCKETS // 100, _NUM_BUCKETS - 1)
