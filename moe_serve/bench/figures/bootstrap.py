"""Estimates how certain a difference is by resampling the requests of both runs with replacement.

R = requests of a run, V = their values (a request has one TTFT and many gaps), N = resamples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_NUM_RESAMPLES = 1000
_MIN_RESAMPLES = 100
_MAX_WEIGHTS = 50_000_000  # drawn for one interval; with more values there are fewer resamples
_AT_ONCE = 1_000_000
_LOW, _HIGH = 2.5, 97.5
_PERCENTILES = {"p50": 0.5, "p99": 0.99}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """All values of a run in order, each with the request it belongs to."""

    values_V: np.ndarray
    request_V: np.ndarray
    num_requests: int

    @classmethod
    def of(cls, groups: Sequence[np.ndarray]) -> _Pool:
        values_V = np.concatenate(groups)
        request_V = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        order_V = np.argsort(values_V, kind="stable")
        return cls(
            values_V=values_V[order_V], request_V=request_V[order_V], num_requests=len(groups)
        )

    def statistics(self, num: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns the statistics of `num` resamples, each [N]. A request drawn twice counts all its
        values twice."""
        blocks = [self._block(size, rng) for size in self._sizes(num)]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _sizes(self, num: int) -> Iterator[int]:
        at_once = max(1, _AT_ONCE // len(self.values_V))
        while num > 0:
            yield min(num, at_once)
            num -= at_once

    def _block(self, num: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        share = np.full(self.num_requests, 1.0 / self.num_requests)
        drawn_NR = rng.multinomial(self.num_requests, share, size=num)
        weights_NV = drawn_NR[:, self.request_V]
        below_NV = np.cumsum(weights_NV, axis=1)
        total_N = below_NV[:, -1]
        found = {"mean": weights_NV @ self.values_V / total_N}
        for name, level in _PERCENTILES.items():
            first_N = np.argmax(below_NV >= level * total_N[:, None], axis=1)
            found[name] = self.values_V[first_N]
        return found


def change_intervals(
    a: Sequence[np.ndarray], b: Sequence[np.ndarray], rng: np.random.Generator
) -> dict[str, tuple[float, float]]:
    """Returns 95% intervals of statistic(b) / statistic(a) - 1, for mean, p50 and p99.

    `a` and `b` have the values of each request. A percentile is the smallest value for which at
    least this share of the values is not above it. A statistic of `a` that is 0 in some resample
    has no interval.
    """
    num_values = sum(len(group) for group in (*a, *b))
    num = max(_MIN_RESAMPLES, min(_NUM_RESAMPLES, _MAX_WEIGHTS // num_values))
    old, new = _Pool.of(a).statistics(num, rng), _Pool.of(b).statistics(num, rng)
    intervals = {}
    for name in old:
        if old[name].min() > 0:
            low, high = np.percentile(new[name] / old[name] - 1, (_LOW, _HIGH))
            intervals[name] = (float(low), float(high))
    return intervals
