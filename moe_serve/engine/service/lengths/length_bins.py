"""Distributions of answer lengths over a few bins, each a constant factor longer than the one
before.

Shapes: B bins, R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NUM_BINS = 24


class LengthBins:
    """Bins from 1 token to the longest answer. Bin b holds the lengths above `upper_B[b - 1]`, up
    to and with `upper_B[b]`:

    longest 2048   upper_B  1 2 3 4 5 6 7 10 14 19 ... 1470 2048
    """

    def __init__(self, longest: int) -> None:
        uppers: list[int] = []
        for bound in np.geomspace(1, max(longest, NUM_BINS), NUM_BINS):
            uppers.append(max(round(float(bound)), uppers[-1] + 1 if uppers else 1))
        self.upper_B: Floats = np.array(uppers, dtype=np.float64)
        self.lower_B: Floats = np.concatenate([np.zeros(1), self.upper_B[:-1]])
        self.middle_B: Floats = (self.lower_B + 1 + self.upper_B) / 2

    @property
    def longest(self) -> int:
        return int(self.upper_B[-1])

    def bins_of(self, lengths_R: Sequence[int] | Ints) -> Ints:
        """Returns the bin of each length. Longer answers than the longest are in the last one."""
        found = np.searchsorted(self.upper_B, np.asarray(lengths_R, dtype=np.float64), "left")
        return np.minimum(found, NUM_BINS - 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """The probabilities of an answer's bins, which add up to 1."""

    bins: LengthBins
    shares_B: Floats

    def quantile(self, level: float, so_far: int = 0) -> float:
        """Returns the length that a share `level` of the answers does not exceed, among those that
        are longer than `so_far`. Within a bin, lengths are equally likely."""
        lower_B, upper_B = self.bins.lower_B, self.bins.upper_B
        start_B = np.clip(float(so_far), lower_B, upper_B)
        left_B = self.shares_B * (upper_B - start_B) / (upper_B - lower_B)
        total = float(left_B.sum())
        if total <= 0.0:
            return float(max(so_far + 1, self.bins.longest))
        sums_B = np.cumsum(left_B) / total
        index = min(int(np.searchsorted(sums_B, level, "left")), NUM_BINS - 1)
        before = float(sums_B[index - 1]) if index else 0.0
        inside = (level - before) / max(float(sums_B[index]) - before, 1e-12)
        start = float(start_B[index])
        return start + min(1.0, max(0.0, inside)) * (float(upper_B[index]) - start)

    def mean(self) -> float:
        return float(self.shares_B @ self.bins.middle_B)

    def level_of(self, length: int) -> float:
        """Returns the share of answers that are at most as long: a number that is evenly spread
        from 0 to 1 over answers if the distributions are right."""
        index = int(self.bins.bins_of([length])[0])
        lower, upper = self.bins.lower_B[index], self.bins.upper_B[index]
        inside = min(1.0, (length - lower) / (upper - lower))
        return float(self.shares_B[:index].sum() + inside * self.shares_B[index])


def pinball(predicted: float, actual: float, level: float) -> float:
    """Returns the loss of a predicted quantile, on the logarithm of lengths: it is least if a share
    `level` of the answers is shorter."""
    error = float(np.log(max(actual, 1.0)) - np.log(max(predicted, 1.0)))
    return max(level * error, (level - 1.0) * error)
